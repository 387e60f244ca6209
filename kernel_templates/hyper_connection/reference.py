"""Hyper-connection coefficients and collapse in plain torch: the exact definition, and the kernel's roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_templates.hyper_connection.spec import Spec
from kernel_templates.rounding import rounded

Tensors = dict[str, Tensor | None]


def _wide(t: Tensor | None) -> Tensor:
    """fp32, or fp64 where the tensor is fp64.

    Raises:
        ValueError: the tensor is missing.
    """
    if t is None:
        raise ValueError("an input that the spec asks for is missing")
    return t.to(torch.promote_types(t.dtype, torch.float32))


def sinkhorn(logits: Tensor, rounds: int, floor: float) -> Tensor:
    """softmax(logits [..., n, n]) + floor, its columns and rows divided in turn by their sums + floor."""
    comb = torch.softmax(logits, dim=-1) + floor
    comb = comb / (comb.sum(-2, keepdim=True) + floor)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + floor)
        comb = comb / (comb.sum(-2, keepdim=True) + floor)
    return comb


def _connected(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: Spec) -> dict[str, Tensor]:
    n = spec.streams
    flat = x.flatten(-2)
    unit = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + spec.eps)
    mix = unit @ fn.T
    factor = torch.cat([s.expand(size) for s, size in zip(scale, (n, n, n * n), strict=False)])[: spec.columns]
    logits = mix * factor + base
    pre = torch.sigmoid(logits[..., :n]) + spec.floor
    outputs = {"h": (pre.unsqueeze(-1) * x).sum(-2)}
    at = n
    if spec.post:
        outputs["post"] = spec.post_factor * torch.sigmoid(logits[..., at : at + n]) + spec.post_floor
        at += n
    if spec.rounds:
        outputs["comb"] = sinkhorn(logits[..., at:].reshape(*logits.shape[:-1], n, n), spec.rounds, spec.floor)
    return outputs


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """h [..., C], post [..., n], comb [..., n, n]; computed in fp32 or, for fp64 inputs, fp64."""
    x, fn, base, scale = (_wide(tensors[name]) for name in ("x", "fn", "base", "scale"))
    return _connected(x, fn, base, scale, spec)


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: inputs as stored, fp32 inside, h and the gradient of x rounded once.

    Post and comb are fp32 outputs; the parameters and their gradients have their own dtype, fp32 as a rule.
    """
    x = rounded(_wide(tensors["x"]), mma_dtype)
    fn, base, scale = (_wide(tensors[name]) for name in ("fn", "base", "scale"))
    outputs = _connected(x, fn, base, scale, spec)
    return {**outputs, "h": rounded(outputs["h"], mma_dtype)}
