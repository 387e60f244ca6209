"""Rotary position embedding in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_templates.rotary.spec import Spec
from kernel_templates.rounding import rounded

Tensors = dict[str, Tensor | None]


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input in fp32, or in fp64 if it is fp64.

    Raises:
        ValueError: it is missing.
    """
    t = tensors[name]
    if t is None:
        raise ValueError(f"{name} is missing")
    return t.to(torch.promote_types(t.dtype, torch.float32))


def angles(table: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """cos or sin of the first and of the second channel of each pair, [1 or B, T, 1, R / 2]."""
    if spec.temporal:
        pairs = table.shape[-1] // 2
        sizes = [spec.temporal, spec.height, pairs - spec.temporal - spec.height]
        parts = [p for half in table.chunk(2, dim=-1) for p in torch.split(half, sizes, dim=-1)]
        table = torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)
    table = table.unsqueeze(-2)
    if spec.angles == "half":
        return table, table
    half = table.shape[-1] // 2
    if spec.angles == "pair":
        return table[..., :half], table[..., :half]
    if spec.pairs == "half":
        return table[..., :half], table[..., half:]
    return table[..., 0::2], table[..., 1::2]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, spec: Spec) -> Tensor:
    """x [B, T, H, D] with its first R channels turned."""
    size = cos.shape[-1] * (2 if spec.angles == "half" else 1)
    turned, passed = x[..., :size], x[..., size:]
    (cos_a, cos_b), (sin_a, sin_b) = angles(cos, spec), angles(sin, spec)
    half = size // 2
    if spec.pairs == "half":
        a, b = turned[..., :half], turned[..., half:]
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    if spec.pairs == "half" or spec.regrouped:
        return torch.cat([a, b, passed], dim=-1)
    return torch.cat([torch.stack([a, b], dim=-1).flatten(-2), passed], dim=-1)


def _normed(x: Tensor, weight: Tensor, spec: Spec) -> Tensor:
    scale = 1 + weight if spec.offset else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps) * scale


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """q_out and k_out; computed in fp32 or, for fp64 inputs, fp64."""
    cos, sin = _given(tensors, "cos"), _given(tensors, "sin")
    outputs = {}
    for name in ("q", "k") if spec.keys else ("q",):
        x = _given(tensors, name)
        if spec.norm:
            x = _normed(x, _given(tensors, f"{name}_weight"), spec)
        outputs[f"{name}_out"] = _turned(x, cos, sin, spec)
    return outputs


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: fp32 inside, outputs and gradients rounded once to ``mma_dtype``, the storage dtype."""
    stored = {
        name: t if t is None or not t.is_floating_point() else rounded(_given(tensors, name), mma_dtype)
        for name, t in tensors.items()
    }
    return {name: rounded(value, mma_dtype) for name, value in reference(stored, spec).items()}
