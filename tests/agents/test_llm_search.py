"""The search with a language model: what it does next, what it spends, and that a kill repeats no paid call.

The ladder and the judge are stood in for by rules on the source's words, so that these tests are about the search; the
slow test at the end runs the real ones.
"""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import operators
import pytest
from llm_server import LlmServer, Said, message
from searching import Scripted, repaired, solo, written

import agents.ladder
from agents import kernel_search
from agents.ladder import Climb
from agents.policy import LLMPolicy
from agents.solo import Solo, Solved
from onboarding.context import StageContext
from onboarding.pipeline import JobOptions
from onboarding.policy import RUNGS, TOP, RulePolicy, SearchState, Try
from onboarding.settings import LlmSettings, Settings
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult

SPEC = operators.spec()


def source(words: str) -> str:
    """A candidate that the fakes understand: ``rung N`` says how far it climbs, ``judge: yes`` what the judge says."""
    return f'"""{words}"""\n\ndef outputs_like(t, c): ...\ndef forward(t, c): ...\ndef backward(t, s, g, n, c): ...\n'


def fake_climb(body: str, decomposition: str, spec: Any, *, unsafe: bool = False) -> Climb:
    rung = next(i for i in range(len(RUNGS)) if f"rung {i}" in body)
    return Climb(source=body, rung=rung, passed=float(rung == TOP), reasons=[] if rung == TOP else [f"stuck at {rung}"])


def fake_judge(context: StageContext) -> JudgeResult:
    generated = context.result("generate", GenerateResult, context.key)
    text = context.artifacts.get(generated.candidate.digest).decode()
    good = "judge: yes" in text
    return JudgeResult(
        outcome="accepted" if good else "refused",
        summary="accepted" if good else "refused",
        spec=SPEC.to_dict(),
        candidate=generated.candidate.digest,
        level="interpreted",
        device="cpu",
        triton="3",
        torch="2",
        seed=1,
        cases=[],
        worst_share=0.5,
        worst_where="y",
        reasons=[] if good else ["case 3: grad x is off"],
        sandbox="none",
    )


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    put_fakes(monkeypatch.setitem, monkeypatch.setattr)


def put_fakes(setitem: Callable[..., None], setattr_: Callable[..., None]) -> None:
    setitem(sys.modules, "onboarding.stages.judge.stage", SimpleNamespace(run=fake_judge))
    setattr_(agents.ladder, "climb", fake_climb)


def run(home: Path, script: list[dict[str, Any]], **llm: Any) -> tuple[Solved, Scripted, Solo]:
    """Search with these answers, one after the other; then the last of the kind that is asked for, again and again."""

    def respond(name: str, prompt: str, n: int) -> dict[str, Any]:
        fitting = [a for a in script[: n + 1] if ("plan" in a) == (name == "written")]
        return script[n] if n < len(script) else fitting[-1]

    bench, sender = solo(home, respond, **llm)
    return bench.search(SPEC), sender, bench


def names(sender: Scripted) -> list[str]:
    return [body["response_format"]["json_schema"]["name"] for body in sender.bodies]


@pytest.mark.usefixtures("fakes")
def test_a_first_candidate_that_passes_is_judged_at_once(tmp_path: Path) -> None:
    solved, sender, bench = run(tmp_path, [written(source("rung 5 judge: yes"))])
    assert solved.accepted
    assert names(sender) == ["written"], "no further seed is paid for"
    assert [e.role for e in bench.store.ledger(solved.job_id)] == ["author", "check", "judge"]
    assert solved.spent.tokens == 1500
    assert solved.spent.money == pytest.approx((1000 * 1.0 + 500 * 2.0) / 1e6)
    assert "INPUTS" not in solved.source, "the fake ladder composes nothing"


@pytest.mark.usefixtures("fakes")
def test_the_best_try_is_refined_not_the_last(tmp_path: Path) -> None:
    script = [
        written(source("rung 3")),
        repaired(("rung 3", "rung 1")),  # worse: try 1 stays the best and is repaired again
        repaired(("rung 3", "rung 4")),
        repaired(("rung 4", "rung 5 judge: yes")),
    ]
    solved, _, bench = run(tmp_path, script)
    assert solved.accepted
    assert [(t.origin, t.parent, t.rung) for t in solved.tries] == [
        ("author", None, 3),
        ("repairer", 1, 1),
        ("repairer", 1, 4),
        ("repairer", 3, 5),
    ]
    assert bench.store.lessons("default", "novel", 9) == ["stuck at 4 -> a factor", "stuck at 3 -> a factor"]


@pytest.mark.usefixtures("fakes")
def test_the_judges_refusal_goes_to_the_repairer(tmp_path: Path) -> None:
    script = [written(source("rung 5 judge: no")), repaired(("judge: no", "judge: yes"))]
    solved, sender, _ = run(tmp_path, script)
    assert solved.accepted
    prompt = sender.bodies[1]["messages"][1]["content"]
    assert "verdict of the judge" in prompt
    assert "case 3: grad x is off" in prompt


@pytest.mark.usefixtures("fakes")
def test_fresh_seeds_when_refining_brings_nothing(tmp_path: Path) -> None:
    script = [written(source("rung 2"))] + [repaired(("rung 2", "rung 1"))] * 3 + [written(source("rung 5 judge: yes"))]
    solved, sender, _ = run(tmp_path, script)
    assert solved.accepted
    assert names(sender) == ["written", "repair", "repair", "repair", "written"]
    ways = [
        b["messages"][1]["content"].rsplit("Write the candidate", 1)[-1]
        for b in sender.bodies
        if "written" in b["response_format"]["json_schema"]["name"]
    ]
    assert ways[0] != ways[1], "another seed is asked for another way"


@pytest.mark.usefixtures("fakes")
def test_a_hopeless_search_ends_at_its_rounds(tmp_path: Path) -> None:
    solved, sender, _ = run(tmp_path, [written(source("rung 1")), repaired(("nothing like this", ""))], rounds=6)
    assert not solved.accepted
    assert "6 candidates were written" in solved.reason
    assert len(sender.bodies) == 6
    assert "stands 0 times" in solved.tries[1].reasons[0], "an edit that does not fit is a failed try, not a crash"


@pytest.mark.usefixtures("fakes")
def test_the_budget_ends_the_search_with_the_best_so_far(tmp_path: Path) -> None:
    _, sender, _ = run(tmp_path / "probe", [written(source("rung 1"))], rounds=1)
    reserved = int(len(json.dumps(sender.bodies[0]["messages"])) / 2) + 16_384
    endless = [written(source("rung 1")), repaired(("rung 1", "rung 1 still"))]
    solved, sender, _ = run(tmp_path / "job", endless, job_tokens=reserved, rounds=50)
    assert not solved.accepted
    assert "budget of the" in solved.reason
    assert solved.spent.tokens <= reserved
    assert 1 <= len(sender.bodies) < 50


@pytest.mark.usefixtures("fakes")
def test_a_silent_endpoint_ends_the_search_not_the_job(tmp_path: Path) -> None:
    told = LlmSettings(base_url="http://127.0.0.1:9/v1", model="m", retries=0)
    bench = Solo(settings=Settings(home=tmp_path, llm=told), options=JobOptions(policy="llm"), say=lambda text: None)
    solved = bench.search(SPEC)
    assert not solved.accepted
    assert "does not answer" in solved.reason


@pytest.mark.usefixtures("fakes")
def test_a_refusing_model_costs_tries_only(tmp_path: Path) -> None:
    class Refusing(Scripted):
        def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
            self.bodies.append(body)
            return {"choices": [{"message": {"role": "assistant", "refusal": "I must not."}, "finish_reason": "stop"}]}

    bench, _ = solo(tmp_path, lambda name, prompt, n: {}, rounds=2)
    bench.send = sender = Refusing(lambda name, prompt, n: {})
    solved = bench.search(SPEC)
    assert not solved.accepted
    assert [t.reasons[0] for t in solved.tries] == ["Refused: I must not."] * 2
    assert len(sender.bodies) == 2


@pytest.mark.usefixtures("fakes")
def test_rules_end_honest_on_a_novel_operator(tmp_path: Path) -> None:
    bench = Solo(settings=Settings(home=tmp_path), options=JobOptions(policy="rules"), say=lambda text: None)
    solved = bench.search(SPEC)
    assert not solved.accepted
    assert solved.reason.startswith("novel, served by its own torch code")


def test_a_search_asks_rules_and_model_for_the_same_kind_of_move() -> None:
    state = SearchState(spec={"family": "norm"}, attempt=1)
    model = LLMPolicy(SimpleNamespace(settings=LlmSettings()))  # type: ignore[arg-type]  # only settings are read
    assert RulePolicy().next_move(state).action == model.next_move(state).action == "specialise"
    refused = Try(number=1, parent=None, origin="template", candidate="a", rung=TOP, refused=True, reasons=["wrong"])
    # the template was refused: rules stop, the model repairs it
    state = state.model_copy(update={"tries": [refused], "verdicts": [{"outcome": "refused"}]})
    assert RulePolicy().next_move(state).action == "give_up"
    move = model.next_move(state)
    assert (move.action, move.target) == ("repair", 1)


# ---- kill -9 at every node ---------------------------------------------------------------------------------------

NODES = ("choose", "write", "check", "submit", "judge", "decide")


def script(body: dict[str, Any], number: int) -> Said:
    name = body["response_format"]["json_schema"]["name"]
    answers = {"written": written(source("rung 4")), "repair": repaired(("rung 4", "rung 5 judge: yes"))}
    return message(json.dumps(answers[name]))


def searched(home: Path, url: str) -> Solved:
    told = LlmSettings(base_url=url, model="m")
    options = JobOptions(policy="llm", device="cpu")
    return Solo(settings=Settings(home=home, llm=told), options=options, say=lambda text: None).search(SPEC)


def killed_after(home: Path, url: str, node: str, times: int) -> None:
    """Run the search; die right after ``node`` has done its work for the ``times``-th time, before it is recorded."""
    put_fakes(operator.setitem, setattr)
    count = 0
    own = getattr(kernel_search._Nodes, node)

    def dying(self: Any, state: Any) -> Any:
        nonlocal count
        result = own(self, state)
        count += 1
        if count == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kernel_search._Nodes, node, dying)
    searched(home, url)


@pytest.mark.usefixtures("fakes")
def test_kill_9_at_any_node_resumes_there_and_pays_nothing_twice(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["agents.ladder", "agents.solo", "onboarding.stages.judge.result"])
    with LlmServer(script) as server:
        for node in NODES:
            home = tmp_path / node
            before = len(server.requests)
            process = spawn.Process(target=killed_after, args=(home, server.url, node, 1))
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL, node
            solved = searched(home, server.url)
            assert solved.accepted, node
            asked = len(server.requests) - before
            assert asked == 2, f"killed after {node}: {asked} calls for two answers"
            assert [t.rung for t in solved.tries] == [4, 5], node
            assert solved.spent.tokens == 2 * 150, node


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_real_ladder_and_judge_accept_a_repaired_kernel_only(tmp_path: Path) -> None:
    fixed = repaired(("(dy * r * s[None, :])", "(2.0 * dy * r * s[None, :])"))
    solved, sender, _ = run(tmp_path, [written(operators.WRONG_GRADIENT, operators.REFERENCE), fixed])
    assert solved.accepted
    assert [t.rung for t in solved.tries] == [RUNGS.index("compiles"), TOP]
    assert "grad x: relative error 0.5" in sender.bodies[1]["messages"][1]["content"]
    assert solved.verdict is not None
    assert solved.verdict.worst_share < 1.0
