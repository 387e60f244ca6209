"""Linear cross-entropy in plain torch: the exact definition, the kernels' algorithm with its roundings, and shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_templates.linear_cross_entropy import template as untyped
from kernel_templates.linear_cross_entropy.spec import Spec
from kernel_templates.rounding import rounded

Tensors = dict[str, Tensor | None]

template: Any = untyped

ODD_SCALE = 1.375
"""Between two powers of two: a value times this rounds apart from the value itself."""


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input.

    Raises:
        ValueError: it is missing.
    """
    t = tensors[name]
    if t is None:
        raise ValueError(f"{name} is missing")
    return t


def _wide(t: Tensor) -> Tensor:
    """fp32, or fp64 where the tensor is fp64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, spec: Spec) -> Tensor:
    """cap(scale (x W^T + b)), [..., V]."""
    z = x @ weight.T
    if bias is not None:
        z = z + bias
    z = z * spec.logit_scale
    return z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)


def _statistics(z: Tensor, target: Tensor) -> dict[str, Tensor]:
    """lse, the target's logit (0 for a target that is no class) and the total, by row."""
    real = (target >= 0) & (target < z.shape[-1])
    chosen = z.gather(-1, torch.where(real, target, 0).unsqueeze(-1)).squeeze(-1)
    chosen = torch.where(real, chosen, torch.zeros((), dtype=z.dtype, device=z.device))
    return {"lse": z.logsumexp(-1), "target_logit": chosen, "total": z.sum(-1)}


def _row_losses(found: dict[str, Tensor], vocabulary: int, spec: Spec) -> Tensor:
    """(lse - (1 - a) z[target] - a / V total + k lse^2) by row."""
    loss = found["lse"] - (1 - spec.label_smoothing) * found["target_logit"]
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing / vocabulary * found["total"]
    return loss + spec.z_loss * found["lse"].square() if spec.z_loss else loss


def _reduced(row: Tensor, counts: Tensor, denominator: Tensor | None, spec: Spec) -> Tensor:
    """The rows that count, reduced; nothing to count gives 0."""
    # a row that does not count gives no gradient either, whatever it holds
    row = torch.where(counts, row, torch.zeros((), dtype=row.dtype, device=row.device))
    if spec.reduction == "none":
        return row
    total = row.sum()
    if spec.reduction == "sum":
        return total
    count = counts.sum().to(row.dtype) if denominator is None else denominator.to(row.dtype)
    return torch.where(count == 0, torch.zeros_like(total), total / torch.where(count == 0, 1, count))


def _outputs(z: Tensor, tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    target = _given(tensors, "target")
    found = _statistics(z, target)
    if spec.reduction == "statistics":
        return {role.name: found[role.name] for role in spec.outputs()}
    counts = target != spec.ignore_index
    possible = (target >= 0) & (target < z.shape[-1])
    row = torch.where(possible, _row_losses(found, z.shape[-1], spec), float("nan"))
    return {"loss": _reduced(row, counts, tensors.get("denominator"), spec)}


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """loss [] or [...], or the statistics; computed in fp32 or, for fp64 inputs, fp64."""
    bias = _wide(_given(tensors, "bias")) if spec.bias else None
    z = _logits(_wide(_given(tensors, "x")), _wide(_given(tensors, "weight")), bias, spec)
    return _outputs(z, tensors, spec)


class _Head(torch.autograd.Function):
    """z = x W^T [N, V]; dW is summed up and rounded as the kernels do it.

    Of the first ``kept`` classes dz is made of exponentials and of a factor by row, which multiplies x before x is
    rounded for the product. Blocks of ``rows`` rows add their dW up, with ``storage`` in W's own dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, kept: int, rows: int, storage: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = dtype, kept, rows, storage
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dz,) = grads
        x, weight = ctx.saved_tensors
        dtype, kept, rows, storage = ctx.how
        scaled = (x * ODD_SCALE).to(dtype).to(x.dtype) / ODD_SCALE
        dw = torch.zeros_like(weight)
        for start in range(0, x.shape[0], rows):
            if start > 0 and storage:
                dw = dw.to(dtype).to(dw.dtype)
            block = slice(start, start + rows)
            dw[:kept] += dz[block, :kept].T @ scaled[block]
            dw[kept:] += dz[block, kept:].T @ x[block]
        return dz @ weight, dw, None, None, None, None


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, Any]
) -> dict[str, Tensor]:
    """The kernels' algorithm: operands of the products are rounded, logits stay in fp32, dz is rounded for backward.

    Kept exponentials stand for dz, and their products with x are made of scaled rows of x, rounded again; several
    blocks of rows round their sum after each where dW is its own accumulator (``accumulate`` = ``storage``). Gradients
    of a scalar loss are rounded for an upstream gradient of 1, and again when they are scaled by the real one.
    """
    scalar = spec.reduction in ("mean", "sum")
    twice = ODD_SCALE if scalar else 1.0

    def leaf(name: str) -> Tensor:
        value = _given(tensors, name)
        # outermost first in backward: the gradient is rounded as stored, scaled, and rounded as returned
        value = rounded(_wide(value), mma_dtype) * twice
        return rounded(value, torch.float32, gradient_dtype=mma_dtype) / twice

    x, weight = leaf("x"), leaf("weight")
    bias = leaf("bias") if spec.bias else None
    needs = tuple(n for n, t in tensors.items() if t is not None and t.requires_grad)
    kept = 0
    if scalar:
        kept = template.kept_classes(weight.shape[0], needs, mma_dtype == torch.float16, spec, config)
    count = x.numel() // max(x.shape[-1], 1)
    rows = max(template.part_size(count, config["rows"]), 1) if count else 1
    head: Any = _Head.apply
    z = head(x.reshape(-1, x.shape[-1]), weight, mma_dtype, kept, rows, config["accumulate"] == "storage")
    z = rounded(z.view(*x.shape[:-1], weight.shape[0]), torch.float32, gradient_dtype=mma_dtype)
    if bias is not None:
        z = z + bias
    z = z * spec.logit_scale
    z = z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)
    return _outputs(z, tensors, spec)


def merged(
    shards: Sequence[dict[str, Tensor]], target: Tensor, spec: Spec, denominator: Tensor | None = None
) -> Tensor:
    """The loss of a vocabulary in shards, from the ``statistics`` of each.

    Args:
        shards: lse, target_logit and (with smoothing) total [...] of every shard. A shard is given ``target`` minus
            its first class, so that a class of another shard is none of its own.
        target: classes of the whole vocabulary [...].
        spec: of the whole: its ``vocabulary`` is the sum of the shards', its reduction that of the result.
        denominator: as the input of that name.

    Ranks reduce instead of stacking: lse by log(sum(exp)), the rest by sum. Gradients flow back through the
    statistics to each shard's operator; dx is the sum over the shards.
    """
    stacked = {name: torch.stack([shard[name] for shard in shards]) for name in shards[0]}
    found = {name: value.sum(0) for name, value in stacked.items() if name != "lse"}
    found["lse"] = stacked["lse"].logsumexp(0)
    return _reduced(_row_losses(found, spec.vocabulary, spec), target != spec.ignore_index, denominator, spec)
