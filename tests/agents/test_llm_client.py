"""The client against a real HTTP server: faults, forms of answer, budget, and nothing paid twice."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from llm_server import LlmServer, Said, error, in_turn, message
from pydantic import SecretStr

from agents.llm.answers import Answer
from agents.llm.caller import Caller, Question, Who, remembered
from agents.llm.cassette import CassetteMiss, Player, Recorder
from agents.llm.endpoint import Endpoint, _sdk
from agents.llm.errors import Invalid, Refused
from agents.llm.probe import probe
from agents.llm.prompt import Data
from onboarding.problem import Problem
from onboarding.settings import LlmSettings
from onboarding.store import BudgetLimits, Purse, Store

KEY = "sk-very-secret-0123456789"
GOOD = json.dumps({"word": "hello", "number": 3})
QUESTION = Question(role="author", system="You write.", task="Write.", data=(Data(title="source", text="x = 1"),))


class Thing(Answer):
    """A word and a number."""

    word: str
    number: int


@dataclasses.dataclass
class Bench:
    """A caller on a fresh database, and the seconds that it would have slept."""

    caller: Caller
    store: Store
    slept: list[float]

    def ask(self, question: Question = QUESTION) -> Thing:
        return self.caller.ask(question, Thing)[0]

    def ledger(self) -> list[tuple[str, str]]:
        return [(e.role, e.state) for e in self.store.ledger(self.caller.who.job_id)]


@functools.cache
def migrated() -> Path:
    """An empty database, migrated once for all tests here."""
    path = Path(tempfile.mkdtemp(prefix="onboard-test-")) / "empty.db"
    store = Store(f"sqlite:///{path}")
    store.migrate()
    with store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return path


def bench(tmp_path: Path, url: str, limits: BudgetLimits | None = None, **settings: Any) -> Bench:
    tmp_path.mkdir(exist_ok=True)
    shutil.copyfile(migrated(), tmp_path / "onboard.db")
    store = Store(f"sqlite:///{tmp_path / 'onboard.db'}")
    job = store.create_job(name="m", model_type="t", owner="o", definition="d")
    told = LlmSettings(base_url=url, model="scripted", api_key=SecretStr(KEY), price_in=10, price_out=30, **settings)
    slept: list[float] = []
    caller = Caller(
        endpoint=Endpoint(told),
        store=store,
        who=Who(job_id=job.id, project="p", stage="generate", key="k", attempt=1),
        settings=told,
        limits=limits or BudgetLimits(),
        memory=tmp_path / "llm.json",
        sleep=slept.append,
        random=random.Random(0),
    )
    return Bench(caller, store, slept)


def test_an_answer_is_typed_and_charged(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        assert told.ask() == Thing(word="hello", number=3)
    (entry,) = told.store.ledger(told.caller.who.job_id)
    assert (entry.tokens_in, entry.tokens_cached, entry.tokens_out, entry.state) == (100, 40, 50, "answered")
    # 60 fresh and 40 cached tokens at 10 USD a million, 50 written at 30
    assert entry.money == pytest.approx((100 * 10 + 50 * 30) / 1e6)
    assert server.requests[0]["response_format"]["json_schema"]["strict"] is True
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


FAULTS = {
    "429": [error(429, "slow down", Retry_After="7")],
    "500": [error(500, "oops"), error(503, "still")],
    "torn body": [Said(body=b'{"choices": [{"mess')],
    "not an object": [Said(body=b"[1, 2]")],
    "no message": [Said(body=b'{"choices": []}')],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_retried_once_for_all(tmp_path: Path, fault: str) -> None:
    with LlmServer(in_turn(*FAULTS[fault], message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        assert told.ask().word == "hello"
        assert len(server.requests) == len(FAULTS[fault]) + 1, "one retry each, none by the SDK on top"
    assert len(told.slept) == len(FAULTS[fault])
    if fault == "429":
        assert 7.0 <= told.slept[0] <= 8.0, "what the server asks for, and a jitter"


def test_a_server_that_stays_down_is_a_problem_without_the_key(tmp_path: Path) -> None:
    with LlmServer(in_turn(error(500, f"your key {KEY} is fine, I am not"))) as server:
        told = bench(tmp_path, server.url, retries=2)
        with pytest.raises(Problem, match="does not answer") as caught:
            told.ask()
        assert len(server.requests) == 3
    assert KEY not in json.dumps(caught.value.to_dict())
    rows = told.store.ledger(told.caller.who.job_id)
    assert all(KEY not in row.model_dump_json() for row in rows)
    assert sum(row.money for row in rows) == 0, "an error is not paid"


@pytest.mark.parametrize("said", [Said(hang_s=30.0), dataclasses.replace(message(GOOD), trickle_s=0.2)])
def test_a_server_that_hangs_or_trickles_is_given_up(tmp_path: Path, said: Said) -> None:
    with LlmServer(in_turn(said, message(GOOD))) as server:
        told = bench(tmp_path, server.url, timeout_s=0.6)
        assert told.ask().word == "hello"
    assert told.ledger() == [("author", "lost"), ("author", "answered")]
    lost = told.store.ledger(told.caller.who.job_id)[0]
    assert lost.money > 0, "it may have been paid: the reservation stays charged"


def test_nobody_listens(tmp_path: Path) -> None:
    told = bench(tmp_path, "http://127.0.0.1:9/v1", retries=1)
    with pytest.raises(Problem, match="does not answer"):
        told.ask()


def test_a_refused_key_is_not_retried(tmp_path: Path) -> None:
    with LlmServer(in_turn(error(401, "bad key"))) as server:
        told = bench(tmp_path, server.url)
        with pytest.raises(Problem) as caught:
            told.ask()
        assert caught.value.kind == "llm-key"
        assert len(server.requests) == 1


def unserved(*modes: str) -> Any:
    """A server that knows some forms of answer only."""

    def script(body: dict[str, Any], number: int) -> Said:
        asked = (body.get("response_format") or {}).get("type") or ("tool" if "tools" in body else "text")
        if asked in modes:
            return error(400, f"unknown parameter: {'tools' if asked == 'tool' else 'response_format'}")
        return message(GOOD)

    return script


def test_forms_of_answer_fall_back_and_are_remembered(tmp_path: Path) -> None:
    with LlmServer(unserved("json_schema", "tool")) as server:
        told = bench(tmp_path, server.url)
        assert told.ask().number == 3
        assert len(server.requests) == 3
        assert server.requests[-1]["response_format"] == {"type": "json_object"}
        assert "must match this JSON schema" in server.requests[-1]["messages"][1]["content"]
        told.ask(dataclasses.replace(QUESTION, sample=1))
        assert len(server.requests) == 4, "the second question starts with what works"
        assert list(remembered(tmp_path / "llm.json").values()) == ["json"]


TOOL = {"id": "1", "type": "function", "function": {"name": "thing", "arguments": GOOD}}
VARIANTS: dict[str, Said] = {
    "tool call": message(None, finish="tool_calls", tool_calls=[TOOL]),
    "arguments as an object": message(
        None, tool_calls=[{**TOOL, "function": {"name": "thing", "arguments": json.loads(GOOD)}}]
    ),
    "old function call": message(None, function_call={"name": "thing", "arguments": GOOD}),
    "tool call said in words": message(f"Sure!\n```json\n{GOOD}\n```\nDone."),
    "thinking before": message(f'<think>{{"word": "no"}}</think>\n{GOOD}'),
    "JSON in a string": message(json.dumps(GOOD)),
    "parts": message([{"type": "text", "text": GOOD[:5]}, {"type": "text", "text": GOOD[5:]}]),
    "no usage": message(GOOD, usage=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_an_answer_are_understood(tmp_path: Path, variant: str) -> None:
    with LlmServer(in_turn(VARIANTS[variant])) as server:
        told = bench(tmp_path, server.url)
        assert told.ask() == Thing(word="hello", number=3)
        assert len(server.requests) == 1
    (entry,) = told.store.ledger(told.caller.who.job_id)
    assert entry.tokens_in > 0
    assert entry.tokens_out > 0


WRONG: dict[str, tuple[Said, str]] = {
    "wrong schema": (message('{"word": 3}'), "number: Field required"),
    "extra member": (message('{"word": "a", "number": 1, "tolerance": 9}'), "tolerance: Extra inputs"),
    "prose": (message("I would rather talk."), "no JSON object"),
    "cut off": (message(GOOD[:10], finish="length"), "cut off at the limit"),
    "nothing": (message(None), "no JSON object"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_sent_back_with_the_reason(tmp_path: Path, wrong: str) -> None:
    said, reason = WRONG[wrong]
    with LlmServer(in_turn(said, message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        assert told.ask().word == "hello"
        assert reason in server.requests[1]["messages"][1]["content"]
    assert told.ledger() == [("author", "answered")] * 2, "both are paid"


def test_a_model_that_never_answers_well_is_invalid(tmp_path: Path) -> None:
    with LlmServer(in_turn(message("no"))) as server:
        told = bench(tmp_path, server.url)
        with pytest.raises(Invalid):
            told.ask()
        assert len(server.requests) == 3


@pytest.mark.parametrize("said", [message(None, refusal="I cannot."), message("", finish="content_filter")])
def test_a_refusal_is_a_refusal(tmp_path: Path, said: Said) -> None:
    with LlmServer(in_turn(said)) as server:
        told = bench(tmp_path, server.url)
        with pytest.raises(Refused):
            told.ask()
        assert len(server.requests) == 1


def test_a_prompt_that_is_too_long_is_cut(tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Said:
        if len(json.dumps(body["messages"])) > 30_000:
            return error(400, "This model's maximum context length is 8192 tokens")
        return message(GOOD)

    long = dataclasses.replace(QUESTION, data=(Data(title="source", text="x = 1\n" * 10_000, most=60_000),))
    with LlmServer(script) as server:
        told = bench(tmp_path, server.url, context_tokens=40_000, answer_tokens=1000)
        assert told.ask(long).word == "hello"
        assert "characters cut ...]" in server.requests[-1]["messages"][1]["content"]
        assert len(server.requests) > 1


def test_the_same_question_is_paid_once(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        told.ask()
        again = bench_again(told, tmp_path, server.url)
        assert again.ask().word == "hello"
        assert len(server.requests) == 1
        again.ask(dataclasses.replace(QUESTION, sample=1))
        assert len(server.requests) == 2, "another sample is another question"


def bench_again(told: Bench, tmp_path: Path, url: str) -> Bench:
    """The same step in a new process."""
    return Bench(dataclasses.replace(told.caller, endpoint=Endpoint(told.caller.settings)), told.store, told.slept)


def test_a_reservation_of_a_dead_process_stays_charged(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        call = f"author:{QUESTION.digest(told.caller.who, Thing)}:0"
        told.caller._reserve("author", call, [{"role": "user", "content": "x" * 3000}], "schema")
        told.ask()
    assert told.ledger() == [("author", "lost"), ("author", "answered")]


LIMITS = {
    "job": BudgetLimits(job=Purse(tokens=20_000, money=9, gpu_s=9, wall_s=900)),
    "project": BudgetLimits(project=Purse(tokens=10**9, money=0.6, gpu_s=9, wall_s=900)),
    "operator": BudgetLimits(operator=Purse(tokens=20_000, money=9, gpu_s=9, wall_s=900)),
    "role author": BudgetLimits(role_tokens={"author": 20_000}),
}


@pytest.mark.parametrize("scope", LIMITS)
def test_a_spent_budget_stops_before_the_call(tmp_path: Path, scope: str) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url, LIMITS[scope], answer_tokens=16_384)
        spent: Problem | None = None
        for sample in range(200):
            try:
                told.ask(dataclasses.replace(QUESTION, sample=sample))
            except Problem as problem:
                spent = problem
                break
        assert spent is not None
        assert spent.kind == "budget-spent"
        assert scope in spent.title
        asked = len(server.requests)
    purse = told.store.spent(job_id=told.caller.who.job_id)
    assert purse.tokens == 150 * asked
    limit = LIMITS[scope].job or LIMITS[scope].operator
    assert limit is None or purse.tokens <= limit.tokens, "a hard limit is never exceeded"


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it(tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Said:
        if "max_tokens" in body:
            return error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return message(GOOD)

    with LlmServer(script) as server:
        told = bench(tmp_path, server.url)
        told.ask()
        told.ask(dataclasses.replace(QUESTION, sample=1))
        assert [("max_tokens" in body) for body in server.requests] == [True, False, False]
    assert told.ledger() == [("author", "answered")] * 2


def test_cancelling_works_between_calls(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url)
        told.ask()
        told.store.request_cancel(told.caller.who.job_id)
        with pytest.raises(Problem, match="cancelled"):
            told.ask(dataclasses.replace(QUESTION, sample=1))
        assert len(server.requests) == 1


def test_the_rate_limit_holds_over_all_callers(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path, server.url, BudgetLimits(requests_per_minute=2))
        told.caller.sleep = lambda seconds: (_ for _ in ()).throw(TimeoutError(seconds))
        told.ask()
        told.ask(dataclasses.replace(QUESTION, sample=1))
        with pytest.raises(TimeoutError) as waited:
            told.ask(dataclasses.replace(QUESTION, sample=2))
    assert 0 < waited.value.args[0] <= 60


def test_cassettes_replay_what_was_recorded(tmp_path: Path) -> None:
    with LlmServer(in_turn(message(GOOD))) as server:
        told = bench(tmp_path / "a", server.url)
        tape = tmp_path / "tape.jsonl"
        told.caller.endpoint = Endpoint(
            told.caller.settings, Recorder(_sdk(told.caller.settings), tape, {"responder": "a scripted server"})
        )
        told.ask()
    assert KEY not in tape.read_text()
    replayed = bench(tmp_path / "b", server.url)
    player = Player(tape)
    assert player.made == {"responder": "a scripted server"}
    replayed.caller.endpoint = Endpoint(replayed.caller.settings, player)
    assert replayed.ask() == Thing(word="hello", number=3)
    with pytest.raises(CassetteMiss):
        replayed.ask(dataclasses.replace(QUESTION, task="Another."))


def test_the_probe_says_what_works(tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Said:
        if "tools" in body:
            return error(400, "tools are not supported")
        return message("maybe" if body.get("response_format", {}).get("type") == "json_schema" else '{"total": 42}')

    with LlmServer(script) as server:
        settings = LlmSettings(base_url=server.url, model="m", api_key=SecretStr(KEY))
        found = {f.name: f for f in probe(settings, memory=tmp_path / "llm.json")}
    assert [f.ok for n, f in found.items() if n.startswith("llm answers")] == [False, False, True, True]
    assert "structured answers by json" in found["language model"].detail
    assert KEY not in str(found)
    assert list(remembered(tmp_path / "llm.json").values()) == ["json"]
    assert not probe(LlmSettings(base_url="", model=""))[0].ok
