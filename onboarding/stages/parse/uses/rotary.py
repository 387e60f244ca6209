"""Rotary embedding behind the functions that modeling files apply to queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from kernel_templates.rotary.spec import Spec
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.rotary import RotaryCall
from onboarding.stages.parse.uses.proof import same_function

CONVENTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"angles": "pair"},
    {"angles": "half"},
    {"pairs": "interleaved"},
    {"pairs": "interleaved", "angles": "pair"},
    {"pairs": "interleaved", "angles": "half"},
    {"pairs": "interleaved", "angles": "pair", "regrouped": True},
)
_BATCH, _TOKENS, _HEADS, _KEY_HEADS = 2, 5, 3, 2


def prove_rotary(call: RotaryCall, dtype: str) -> Spec | None:
    """The rotary spec that a function computes with a call's arguments, or None."""
    q, cos = call.shapes["q"], call.shapes["cos"]
    axis = call.options.get("unsqueeze_dim", 1)
    if len(q) != 4 or len(cos) != 3 or axis not in (1, 2) or set(call.options) - {"unsqueeze_dim"}:
        return None
    heads = q[axis]
    for flags in CONVENTIONS:
        try:
            spec = Spec(
                heads=heads,
                key_heads=call.shapes.get("k", q)[axis],
                head_dim=q[-1],
                rotary_dim=cos[-1] * (2 if flags.get("angles") == "half" else 1),
                keys="k" in call.shapes,
                dtype=dtype,
                **flags,
            )
        except ValueError:  # this convention has no such sizes
            continue
        if _proven(call, spec, axis):
            return spec
    return None


def _proven(call: RotaryCall, spec: Spec, axis: int) -> bool:
    """cos and sin of unrelated angles for every channel: a function that reads only half of them shows."""
    generator = torch.Generator().manual_seed(29)
    turned = 8
    size = 8 if spec.head_dim == spec.rotary_dim else 14
    small = spec.resized(heads=_HEADS, key_heads=_KEY_HEADS, head_dim=size, rotary_dim=turned)
    width = turned // 2 if spec.angles == "half" else turned
    angle = 3.0 * torch.randn(_BATCH, _TOKENS, width, generator=generator)
    tensors: dict[str, torch.Tensor | None] = {
        "q": torch.randn(_BATCH, _TOKENS, _HEADS, size, generator=generator),
        "cos": angle.cos(),
        "sin": 1.25 * angle.sin(),
    }
    if spec.keys:
        tensors["k"] = torch.randn(_BATCH, _TOKENS, _KEY_HEADS, size, generator=generator)

    def turned_back(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2) if axis == 1 else t

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        arguments = [turned_back(t) for n in ("q", "k") if (t := given.get(n)) is not None]
        with quiet():
            found = call.function(*arguments, given["cos"], given["sin"], **call.options)
        outputs = found if isinstance(found, tuple) else (found,)
        return {f"{n}_out": turned_back(t) for n, t in zip(("q", "k"), outputs, strict=False)}

    return same_function(run, small, tensors)
