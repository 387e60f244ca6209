"""The short causal convolution behind the function that transformers marks as replaceable."""

from __future__ import annotations

import torch

from kernel_templates.short_convolution.spec import WIDEST, Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.marked import MarkedFunction
from onboarding.stages.parse.uses.proof import same_function

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def prove_short_convolution(call: LeafCall, dtype: str) -> Spec | None:
    """The short convolution spec that a marked function computes with a call's settings, or None."""
    facts = call.facts
    activation = ACTIVATIONS.get(facts["activation"])
    if activation is None or not 2 <= facts["width"] <= WIDEST:
        return None
    spec = Spec(
        channels=facts["channels"], width=facts["width"], activation=activation, bias=facts["bias"], dtype=dtype
    )
    return spec if _proven(facts["marked"], spec, facts["activation"]) else None


def _proven(marked: MarkedFunction, spec: Spec, activation: str | None) -> bool:
    """Two sequences, one of them as short as the filter allows, on the function itself."""
    generator = torch.Generator().manual_seed(19)
    small = spec.resized(channels=6)

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        x, weight = given["x"], given["weight"]
        assert x is not None
        with quiet():
            y = marked.function(x.transpose(1, 2), weight, bias=given.get("bias"), activation=activation)
        return {"y": y.transpose(1, 2)}

    for batch, length in ((2, 21), (1, spec.width - 1)):
        tensors: dict[str, torch.Tensor | None] = {
            "x": torch.randn(batch, length, 6, generator=generator),
            "weight": torch.randn(6, spec.width, generator=generator),
        }
        if spec.bias:
            tensors["bias"] = torch.randn(6, generator=generator)
        if not same_function(run, small, tensors):
            return False
    return True
