"""The architect: from a module's code and what it was called with to an operator with semantics of its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from agents.llm.answers import Answer
from agents.llm.caller import Question
from agents.llm.prompt import Data
from onboarding.novel.facts import CoreSeen, NovelModule, OperatorProposal

ROLE = "architect"


class Input(Answer):
    """One tensor that the operator takes."""

    name: str
    argument: str
    """Of the core, as listed."""
    shape: list[str]
    """A dim's name, a number, or K*NAME for each axis."""


class Output(Answer):
    """One tensor that it returns, in order."""

    name: str
    """None where it returns None."""
    shape: list[str]


class Fixed(Answer):
    """An argument that is no tensor."""

    argument: str
    value: str
    """A literal, or factor * DIM ** power."""


class Proposed(Answer):
    """An operator that the module computes."""

    name: str
    """A few words."""
    function: str
    """The core; empty for the forward."""
    inputs: list[Input]
    constants: list[Fixed]
    outputs: list[Output]
    source: str
    """The reference."""


@cache
def guide() -> str:
    """The role's fixed words."""
    return (Path(__file__).parent / "architect.md").read_text()


def question(module: NovelModule, failures: list[str], number: int) -> Question:
    """What the architect is asked.

    Args:
        failures: why the proposals before were not proven.
        number: of earlier proposals.
    """
    data = [Data(title="the module's class", text=module.source, most=24_000)]
    for core in module.cores:
        data.append(Data(title="a core and how it is called", text=core_words(core), most=12_000, rank=1))
    if failures:
        data.append(Data(title="what the proof says of your claims before", text="\n".join(failures), most=6_000))
    task = (
        "Propose the operator of the module above."
        if not failures
        else ("Your claim was not proven. Find out why, and propose the operator of the module above again.")
    )
    return Question(role=ROLE, system=guide(), task=task, data=tuple(data), sample=number)


def proposal_of(answer: Proposed) -> OperatorProposal:
    """The answer as the domain knows it."""
    return OperatorProposal.model_validate(answer.model_dump())


def core_words(core: CoreSeen) -> str:
    """A core for a reader."""
    lines = [f"function: {core.function!r}" + (" (the module's forward)" if not core.function else "")]
    if core.obstacle:
        return "\n".join([*lines, f"obstacle: {core.obstacle}"])
    lines.append("tensors (argument: shape in a small trial model; published size, T tokens, batch 1):")
    for t in core.tensors:
        sizes = ", ".join(_size(*size) for size in t.sizes)
        lines.append(f"  {t.argument}: {t.twin}; [{sizes}] {t.dtype}")
    lines.append(
        "other arguments, in the trial model: " + (", ".join(f"{n} = {v}" for n, v in core.constants.items()) or "none")
    )
    returns = [f"{shape}" for shape in core.outputs]
    lines.append(f"returns {'one tensor' if core.single else 'a tuple'}, in the trial model: {', '.join(returns)}")
    return "\n".join([*lines, "source:", core.source] if core.source else lines)


def _size(constant: int, each: int) -> str:
    if not each:
        return str(constant)
    text = "T" if each == 1 else f"{each} T"
    return f"{text} + {constant}" if constant else text
