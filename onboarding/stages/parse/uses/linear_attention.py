"""Linear attention behind the functions that transformers marks as replaceable."""

from __future__ import annotations

import inspect

import torch
from torch.nn import functional as F

from kernel_templates.linear_attention.spec import Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.marked import MarkedFunction
from onboarding.stages.parse.uses.proof import FP32_RECURRENCE, same_function


def prove_linear_attention(call: LeafCall, dtype: str) -> Spec | None:
    """The linear attention spec that a marked function computes with a call's settings, or None."""
    facts = call.facts
    default = facts["key_dim"] ** -0.5
    scale = facts["scale"]
    if facts["value_heads"] % facts["key_heads"]:
        return None
    spec = Spec(
        key_heads=facts["key_heads"],
        value_heads=facts["value_heads"],
        key_dim=facts["key_dim"],
        value_dim=facts["value_dim"],
        decay=facts["decay"],
        delta=True,
        qk_l2norm=facts["qk_l2norm"],
        scale=None if scale is None or abs(scale / default - 1) < 1e-6 else float(scale),
        dtype=dtype,
    )
    return spec if _proven(facts["marked"], spec) else None


def _proven(marked: MarkedFunction, spec: Spec) -> bool:
    """Two sequences, a length that is no multiple of the chunk, an initial state."""
    generator = torch.Generator().manual_seed(17)
    b, t, hk, dk, dv = 2, 150, 2, 16, 24
    hv = hk * (spec.value_heads // spec.key_heads)
    small = spec.resized(key_heads=hk, value_heads=hv, key_dim=dk, value_dim=dv)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gate_shape = (b, t, hv, dk) if spec.decay == "channel" else (b, t, hv)
    tensors: dict[str, torch.Tensor | None] = {
        "q": normal(b, t, hk, dk),
        "k": normal(b, t, hk, dk) * (1.0 if spec.qk_l2norm else dk**-0.5),
        "v": normal(b, t, hv, dv),
        "g": -0.3 * F.softplus(normal(*gate_shape)),
        "beta": torch.sigmoid(normal(b, t, hv)),
        "initial_state": normal(b, hv, dk, dv),
    }
    names = set(inspect.signature(marked.function).parameters)
    long = {"q": "query", "k": "key", "v": "value"}

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        arguments = {name if name in names else long[name]: value for name, value in given.items()}
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": spec.qk_l2norm, "scale": spec.scale}
        options = {name: value for name, value in options.items() if name in names and value is not None}
        with quiet():
            o, final_state = marked.function(**arguments, **options)
        return {"o": o, "final_state": final_state}

    return same_function(run, small, tensors, FP32_RECURRENCE)
