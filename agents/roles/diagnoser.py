"""The diagnoser: from a measured deviation or bottleneck to a cause and an action, both out of what the facts allow."""

from __future__ import annotations

from agents.llm.answers import Answer
from agents.llm.caller import Question
from agents.llm.prompt import Data
from onboarding.policy import Diagnosis, Finding, ruled

ROLE = "diagnoser"
SYSTEM = (
    "You find the cause of a deviation or a bottleneck that was measured in a model with generated kernels. You get "
    "the measurements, the kernels that may be guilty, and lists of the causes and remedies that the facts allow. "
    "Choose one cause and one remedy out of these lists, name the kernels that the remedy is for by their digests, and "
    "say in at most three sentences how the evidence leads there. `drop`: torch serves the operator again. `repair`: "
    "the kernel is written anew with your explanation at hand, judged again, and the model is compared again: choose "
    "it where the evidence says what may be wrong in the kernel. `report`: nothing is changed. State no number that is "
    "not given."
)


class Diagnosed(Answer):
    """Cause and action."""

    cause: str
    """One of the causes listed."""
    remedy: str
    """One of the remedies listed."""
    digests: list[str]
    """Kernels that the remedy is for; empty for ``report``."""
    explanation: str
    """At most three sentences."""


def question(finding: Finding) -> Question:
    """What the diagnoser is asked."""
    suspects = [f"{s.digest}: {s.words}; {s.evidence}" for s in finding.suspects]
    data = (
        Data(title="what was measured", text="\n".join([finding.summary, *finding.evidence]), most=8_000),
        Data(title="kernels that may be guilty", text="\n".join(suspects) or "none", most=6_000),
    )
    task = (
        f"Stage: {finding.stage}. Causes that the facts allow: {', '.join(finding.causes)}. Remedies that can be "
        f"carried out: {', '.join(finding.remedies)}. Diagnose."
    )
    return Question(role=ROLE, system=SYSTEM, task=task, data=data)


def within(answer: Diagnosed, finding: Finding) -> Diagnosis:
    """The answer, held to what the facts allow; anything else is the rules' choice."""
    known = {suspect.digest for suspect in finding.suspects}
    digests = list(dict.fromkeys(answer.digests))
    chosen = answer.cause in finding.causes and answer.remedy in finding.remedies and set(digests) <= known
    if not chosen or (answer.remedy in ("drop", "repair") and not digests):
        return ruled(finding)
    return Diagnosis.model_validate(
        {
            "cause": answer.cause,
            "remedy": answer.remedy,
            "digests": digests if answer.remedy in ("drop", "repair") else [],
            "words": answer.explanation[:600],
            "by": "llm",
        }
    )
