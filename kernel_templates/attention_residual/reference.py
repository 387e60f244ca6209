"""Attention residuals in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_templates.attention_residual.spec import Spec
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


def _scores(query: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Scores and rsqrt of mean squares [L, ...] of stacked sources [L, ..., D]."""
    r = torch.rsqrt(v.square().mean(-1) + spec.eps)
    return spec.scale * r * (v * query).sum(-1), r


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """h [..., D], computed in fp32 or, for fp64 inputs, fp64."""
    v = torch.stack([_given(tensors, f"v{i}") for i in range(spec.sources)])
    scores, _ = _scores(_given(tensors, "query"), v, spec)
    return {"h": (scores.softmax(0).unsqueeze(-1) * v).sum(0)}


class _Read(torch.autograd.Function):
    """h rounded once; backward takes <dh, h> from the rounded h, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, v: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
        scores, r = _scores(query, v, spec)
        p = scores.softmax(0)
        h: Tensor = (p.unsqueeze(-1) * v).sum(0).to(dtype).to(v.dtype)
        ctx.save_for_backward(query, v, scores, r, p, h)
        ctx.scale = spec.scale
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, v, scores, r, p, h = ctx.saved_tensors
        dh = grads[0]
        ds = p * ((dh * v).sum(-1) - (dh * h).sum(-1))
        g = (ctx.scale * ds * r).unsqueeze(-1)
        dv = p.unsqueeze(-1) * dh + g * query - v * (ds * scores * r.square() / v.shape[-1]).unsqueeze(-1)
        return (g * v).flatten(0, -2).sum(0), dv, None, None


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: fp32 inside, results rounded once to ``mma_dtype``, the storage dtype."""
    v = torch.stack([rounded(_given(tensors, f"v{i}"), mma_dtype) for i in range(spec.sources)])
    h: Tensor = _Read.apply(rounded(_given(tensors, "query"), mma_dtype), v, spec, mma_dtype)  # type: ignore[no-untyped-call]
    return {"h": h}
