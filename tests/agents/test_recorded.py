"""The exchanges of the evaluation as recorded: what the model answered is still understood, clean and accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from searching import solo

from agents.llm import answers
from agents.roles import author, repairer
from benchmarks.agents import suite
from onboarding.stages.generate.compose import compose
from onboarding.stages.judge.structure import findings

TAPE = Path(__file__).parent / "cassettes" / "suite-2026-12-01.jsonl"
HEAD, *LINES = TAPE.read_text().splitlines()
EXCHANGES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
SCHEMAS: dict[str, Any] = {"written": author.Written, "repair": repairer.Repair}


def schema_of(exchange: dict[str, Any]) -> str:
    return str(exchange["body"]["response_format"]["json_schema"]["name"])


def operator_of(exchange: dict[str, Any]) -> str:
    """Which operator a question was about: its reference stands in the prompt."""
    prompt = exchange["body"]["messages"][1]["content"]
    return next(name for name in suite.names() if suite.load(name).source.strip() in prompt)


def answer_of(exchange: dict[str, Any]) -> Any:
    choice = exchange["completion"]["choices"][0]
    return answers.read(choice["message"], choice["finish_reason"], SCHEMAS[schema_of(exchange)])


def test_the_cassette_says_how_it_was_made() -> None:
    made = json.loads(HEAD)["made"]
    assert "saw the requests only" in made["responder"]
    assert made["date"] == "2026-12-01"
    assert len({operator_of(e) for e in EXCHANGES}) == 12


def test_no_request_holds_a_key_or_a_path_of_the_host() -> None:
    for exchange in EXCHANGES:
        assert set(exchange) == {"request", "body", "completion"}
        assert "Bearer" not in json.dumps(exchange)


@pytest.mark.parametrize("number", range(len(EXCHANGES)))
def test_an_answer_is_understood_and_its_source_clean(number: int) -> None:
    exchange = EXCHANGES[number]
    answer, spec = answer_of(exchange), suite.load(operator_of(exchange))
    if isinstance(answer, author.Written):
        assert [str(f) for f in findings(compose(answer.source, spec).encode())] == []
    else:
        assert answer.source.strip() or answer.edits


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["dynamic_tanh", pytest.param("forgetting_attention", marks=pytest.mark.slow)])
def test_a_search_with_the_recorded_answers_ends_accepted(name: str, tmp_path: Path) -> None:
    """Played by operator and role in the order of recording, so that a prompt may be worded anew."""
    mine = [e for e in EXCHANGES if operator_of(e) == name]
    left: dict[str, Iterator[Any]] = {s: iter([answer_of(e) for e in mine if schema_of(e) == s]) for s in SCHEMAS}

    def respond(schema: str, prompt: str, number: int) -> dict[str, Any]:
        assert suite.load(name).source.strip() in prompt
        found: dict[str, Any] = next(left[schema]).model_dump()
        return found

    bench, sender = solo(tmp_path, respond)
    solved = bench.search(suite.load(name))
    assert solved.accepted, solved.reason
    assert len(sender.bodies) <= len(mine)
