"""The author: from a reference (and perhaps a template) to a candidate."""

from __future__ import annotations

from typing import Any

from agents.llm.answers import Answer
from agents.llm.caller import Question
from agents.llm.prompt import Data
from agents.roles import examples
from agents.roles.common import guide, operator_data

ROLE = "author"
LESSONS_SHOWN = 12
WAYS = (
    "Choose the simplest parallel form that is right.",
    "Choose the parallel form with the fewest passes over device memory.",
    "Choose another parallel form than the obvious one: another dim per program, or another order of loops.",
)
"""What makes several first candidates differ."""


class Written(Answer):
    """A candidate with its plan."""

    plan: str
    """The backward's formulas, what one program owns, what is saved. A few lines."""
    decomposition: str
    """Python source of ``reference(...)`` with the operator's inputs by name: the kernel's own algorithm in plain
    torch. It is compared with the operator's reference in float64. Empty if the algorithm is the reference's."""
    source: str
    """The candidate module."""


def question(spec: dict[str, Any], *, sample: int, lessons: list[str]) -> Question:
    """What the author is asked.

    Args:
        spec: of the operator.
        sample: number of this first candidate, from 0.
        lessons: of earlier searches.
    """
    data = operator_data(spec)
    near = examples.nearest(str(spec.get("source", "")))
    if near.name != "rows":  # that one stands in the guide
        text = f"# the reference\n{near.reference}\n\n# an accepted candidate\n{near.kernel}"
        data.insert(0, Data(title="example of another operator with a similar structure", text=text, rank=5))
    if lessons:
        text = "\n".join(f"- {lesson}" for lesson in lessons[:LESSONS_SHOWN])
        data.append(Data(title="lessons of earlier searches", text=text, most=6_000, rank=4))
    task = (
        f"Write the candidate for the operator above. {WAYS[sample % len(WAYS)]} "
        "Give the plan, the decomposition (or an empty text), and the module's source."
    )
    return Question(role=ROLE, system=guide(), task=task, data=tuple(data), sample=sample)
