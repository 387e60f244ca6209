"""The reporter: a job's summary in words. It may only repeat what the record holds: every number is looked up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agents.llm.answers import Answer
from agents.llm.caller import Caller, Question
from agents.llm.errors import Invalid
from agents.llm.prompt import Data

ROLE = "reporter"
LONGEST = 1_500
SYSTEM = (
    "You write the first paragraph of a technical report: what was onboarded, which kernels were made and proven, what "
    "was refused or not measured, in that order. Plain English, no praise, no advice. Every number must stand in the "
    "record exactly or rounded; do not compute new ones. Do not write numbers in words."
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?(?![\w.]*\d)")


class Summary(Answer):
    """The paragraph."""

    text: str


def summary(caller: Caller, facts: dict[str, Any]) -> str:
    """A checked summary.

    Raises:
        Invalid: a number in it is not in the record, twice.
        Problem, LlmError: the call itself failed.
    """
    record = json.dumps(facts, indent=1, sort_keys=True)
    wrong: list[str] = []
    for sample in range(2):
        told = f" Your earlier text held numbers that the record does not: {', '.join(wrong)}." if wrong else ""
        asked = Question(
            role=ROLE,
            system=SYSTEM,
            task=f"Write the paragraph, at most {LONGEST} characters.{told}",
            data=(Data(title="record of the job", text=record, most=40_000),),
            sample=sample,
        )
        answer, _ = caller.ask(asked, Summary)
        text = " ".join(answer.text.split())[:LONGEST]
        wrong = unknown_numbers(text, facts)
        if not wrong:
            return text
    raise Invalid(f"numbers that the record does not hold: {', '.join(wrong)}")


def unknown_numbers(text: str, facts: dict[str, Any]) -> list[str]:
    """Numbers in ``text`` that no value of the record rounds to, as they are written."""
    known = list(_values(facts))
    return [word for word in _NUMBER.findall(text) if not any(_is(word, value) for value in known)]


def _values(facts: Any) -> Iterator[float]:
    """Every number in the record, those inside its texts and the lengths of its lists included."""
    if isinstance(facts, bool) or facts is None:
        return
    if isinstance(facts, int | float):
        yield float(facts)
    elif isinstance(facts, str):
        for word in _NUMBER.findall(facts):
            yield float(word.rstrip("%").replace(",", ""))
    elif isinstance(facts, dict):
        for name, value in facts.items():
            yield from _values(str(name))
            yield from _values(value)
    elif isinstance(facts, list | tuple):
        yield float(len(facts))
        for value in facts:
            yield from _values(value)


def _is(word: str, value: float) -> bool:
    """Whether a written number is ``value``, rounded to the digits that are written; percent of a share too."""
    digits = word.rstrip("%").replace(",", "")
    written = float(digits)
    mantissa, _, exponent = digits.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)
    half = 0.5 * 10.0**-places * (1 + 1e-9)
    candidates = [value, -value] if not word.startswith(("-", "+")) else [value]
    if word.endswith("%"):
        candidates += [100 * c for c in candidates]
    if len(mantissa.strip("+-0.").replace(".", "")) > 1:  # thousands, millions, billions are written with their unit
        candidates += [c / scale for c in candidates for scale in (1e3, 1e6, 1e9, 1e12)]
    return any(abs(written - c) <= half for c in candidates) and (written != 0 or value == 0)
