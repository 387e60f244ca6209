"""Deriving a twin for any definition: in the sandbox when it brings code of its own. Free of torch on this side."""

from __future__ import annotations

import dataclasses
from typing import Any

from onboarding.custom_code.confined import call
from onboarding.custom_code.definition import Definition
from onboarding.problem import Problem
from onboarding.twin.plan import TwinPlan


def plan_of(config: dict[str, Any], *, layers_at_least: int, sequence_length: int) -> dict[str, Any]:
    """The twin's plan as JSON holds it; see :func:`onboarding.twin.search.derive`."""
    from onboarding.twin.search import derive
    from onboarding.twin.threads import one_thread

    with one_thread():
        plan = derive(config, layers_at_least=layers_at_least, sequence_length=sequence_length)
    return dataclasses.asdict(plan)


def derive_twin(definition: Definition, *, layers_at_least: int, sequence_length: int, **where: Any) -> TwinPlan:
    """The plan of a definition's twin.

    Whoever builds it does so in the sandbox too, after :func:`onboarding.custom_code.load.install`, if there is code.

    Args:
        definition: configuration and code.
        layers_at_least: lower bound of the depth.
        sequence_length: tokens that the twin will see.
        where: scratch, unsafe and limits of :func:`onboarding.custom_code.confined.call`.

    Raises:
        Problem: no twin can be derived, or the definition's code was stopped.
    """
    arguments = {"layers_at_least": layers_at_least, "sequence_length": sequence_length}
    answer = call("onboarding.twin.confined:plan_of", definition, arguments, **where)
    try:
        plan = TwinPlan(**{**answer, "layers": tuple(int(layer) for layer in answer["layers"])})
    except (TypeError, ValueError, KeyError) as error:
        raise Problem(
            "code-wrong-answer", "the definition's code made the twin's plan unreadable", str(error)
        ) from None
    if not isinstance(plan.config, dict) or not isinstance(plan.sizes, dict) or not plan.layers:
        raise Problem("code-wrong-answer", "the definition's code made the twin's plan unreadable")
    return plan
