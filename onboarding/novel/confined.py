"""Looking at novel modules and proving claims about them, sandboxed where the definition has code. Free of torch."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from onboarding.custom_code.confined import call
from onboarding.custom_code.definition import Definition
from onboarding.novel.facts import NovelModule, OperatorProposal, Proof
from onboarding.problem import Problem
from onboarding.twin.plan import TwinPlan


def survey(definition: Definition, plan: TwinPlan, names: list[str], **where: Any) -> list[NovelModule]:
    """What is seen of the modules of these classes on the twin and at the published size.

    Args:
        definition: configuration and code.
        plan: of the twin.
        names: qualified class names.
        where: scratch, unsafe and limits of :func:`onboarding.custom_code.confined.call`.

    Raises:
        Problem: the definition's code was stopped, raised, or answered something else.
    """
    arguments = {"plan": plan.to_json(), "names": names}
    answer = call("onboarding.novel.inside:survey", definition, arguments, **where)
    try:
        found = [NovelModule.model_validate(entry) for entry in answer]
    except (ValidationError, TypeError) as error:
        raise _strange(error) from None
    return [module for module in found if module.name in names]


def prove(
    definition: Definition, plan: TwinPlan, module: NovelModule, proposal: OperatorProposal, tokens: int, **where: Any
) -> Proof:
    """Try a proposal on the twin.

    Raises:
        Problem: as :func:`survey`.
    """
    arguments = {
        "plan": plan.to_json(),
        "module": module.model_dump(mode="json"),
        "proposal": proposal.model_dump(mode="json"),
        "tokens": tokens,
    }
    answer = call("onboarding.novel.inside:prove", definition, arguments, **where)
    try:
        return Proof.model_validate(answer)
    except (ValidationError, TypeError) as error:
        raise _strange(error) from None


def _strange(error: Exception) -> Problem:
    return Problem(
        "code-wrong-answer",
        "the definition's code made the survey of its novel modules unreadable",
        " ".join(str(error).split())[:300],
    )
