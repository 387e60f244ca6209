"""The analyst: from a timed kernel, its resources and its floor to the next change and what it should gain."""

from __future__ import annotations

import json

from agents.llm.answers import Answer
from agents.llm.caller import Caller, Question
from agents.llm.errors import LlmError
from agents.llm.prompt import Data
from agents.roles.common import guide
from onboarding.policy import Change, Tuned
from onboarding.problem import Problem

ROLE = "analyst"
WORTH = 0.01
"""Expected gain, as a share of the whole step, below which nothing is changed."""
NEAR = 1.15
"""Of its floor: a kernel this near is left alone."""
WORDS = 1_200


class Analysed(Answer):
    """The next change."""

    bottleneck: str
    """What limits the kernel now: bytes, FLOPs, latency, launches, occupancy, and the evidence for it."""
    change: str
    """The one change to try next, precise enough for the author of the kernel; empty if none is worth it."""
    expected_ms: float
    """Forward and backward together after it."""


def question(tuned: Tuned, number: int) -> Question:
    """What the analyst is asked."""
    facts = {
        "milliseconds, forward and backward": tuned.milliseconds,
        "floor by bytes and FLOPs, ms": tuned.floor_ms,
        "share of the step without a kernel": tuned.share_of_step,
        "timed configurations": tuned.rows,
        "compiled kernels": tuned.resources,
    }
    data = (
        Data(title="what was measured", text=json.dumps(facts, indent=1), most=8_000),
        Data(title="the kernel", text=tuned.source, most=40_000),
    )
    task = (
        "The kernel above is accepted and its configurations are searched. Say what limits it now, and propose the one "
        "change to its algorithm that should gain most, with the time that you expect. It cannot go below the floor."
    )
    return Question(role=ROLE, system=guide(), task=task, data=data, sample=number)


def worth(tuned: Tuned, expected_ms: float) -> float:
    """Share of the whole step that a change should gain; never more than the floor leaves."""
    if tuned.milliseconds <= 0:
        return 0.0
    after = max(expected_ms, tuned.floor_ms)
    return tuned.share_of_step * max(0.0, 1.0 - after / tuned.milliseconds)


def best(caller: Caller, tuned: list[Tuned], number: int) -> tuple[str, Change] | None:
    """Ask about each kernel that has room, and take what should gain most on the whole step."""
    found: list[tuple[float, str, Change]] = []
    for one in sorted(tuned, key=lambda t: -worth(t, t.floor_ms)):
        if one.milliseconds <= NEAR * one.floor_ms or worth(one, one.floor_ms) < WORTH:
            continue
        try:
            answer, _ = caller.ask(question(one, number), Analysed)
        except LlmError:
            continue
        except Problem as problem:
            if problem.kind == "job-cancelled":
                raise
            break
        gain = worth(one, answer.expected_ms)
        if answer.change.strip() and gain >= WORTH:
            words = f"{answer.bottleneck[:WORDS]}: {answer.change[:WORDS]}"
            found.append((gain, one.digest, Change(words=words, expected_ms=max(answer.expected_ms, one.floor_ms))))
    if not found:
        return None
    _, digest, change = max(found, key=lambda entry: entry[0])
    return digest, change
