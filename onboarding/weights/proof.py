"""Asking for the proof on the twin, wherever its model may be built, and putting what came of it in words."""

from __future__ import annotations

import dataclasses
from typing import Any

from onboarding.custom_code.confined import call
from onboarding.custom_code.definition import Definition
from onboarding.problem import Problem
from onboarding.twin.confined import derive_twin
from onboarding.weights.index import pattern
from onboarding.weights.result import Placement
from onboarding.weights.stored import logical_tensors

SEQUENCE = 64


def proof_on_twin(definition: Definition, mapping: list[Placement], **where: Any) -> str:
    """What a synthetic checkpoint of the twin showed, or why there was none.

    Args:
        definition: configuration and code.
        mapping: of the full model; says how the published values are stored.
        where: scratch, unsafe and limits of :func:`onboarding.custom_code.confined.call`.
    """
    names = [source for p in mapping if p.how != "tied" for source in p.sources]
    published = sorted({pattern(tensor.name) for tensor in logical_tensors(names)[0]})
    fp8 = any(p.stored == "fp8 in blocks" for p in mapping)
    try:
        plan = derive_twin(definition, layers_at_least=2, sequence_length=SEQUENCE, **where)
        arguments = {"plan": dataclasses.asdict(plan), "published": published, "fp8": fp8}
        return str(call("onboarding.weights.prove:proven_or_why", definition, arguments, **where))
    except Problem as problem:
        return f"not proven: {problem.title}"
