"""The indexer in plain torch: the exact definition, and the kernels' algorithm with its roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_templates.indexer.spec import Spec
from kernel_templates.rounding import rounded

Tensors = dict[str, Tensor | None]

NEARNESS = 4e-7
"""Scores differ if they do by this share of sum_h |w_h| |q_h| max |k|: fp32 sums of D products and H heads may order
closer ones either way."""
QUERIES = 128
"""Rows that are worked on at once."""


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input in fp32, or in fp64 if it is fp64; integers as they are.

    Raises:
        ValueError: it is missing.
    """
    t = tensors[name]
    if t is None:
        raise ValueError(f"{name} is missing")
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def seen(tensors: Tensors, keys: int) -> Tensor:
    """Which keys each query sees, bool [B, S, T]."""
    at = torch.arange(keys, device=_given(tensors, "begin").device)
    begin, end = _given(tensors, "begin"), _given(tensors, "end")
    return (at >= begin.unsqueeze(-1)) & (at < end.unsqueeze(-1))


def _heads(q: Tensor, k: Tensor, weights: Tensor | None, spec: Spec) -> Tensor:
    """I [B, S, K] of q [B, S, H, D] with k [B, T, D] (then K = T) or with each query's own k [B, S, K, D]."""
    equation = "bshd,btd->bsht" if k.dim() == 3 else "bshd,bstd->bsht"
    z = torch.einsum(equation, q, k)
    z = z.relu() if spec.activation == "relu" else z
    z = z.sum(2) if weights is None else (z * weights.unsqueeze(-1)).sum(2)
    scores: Tensor = z * q.shape[-1] ** -0.5
    return scores


def all_scores(tensors: Tensors, spec: Spec) -> Tensor:
    """Scores of all pairs [B, S, T], minus infinity where a query does not see a key. No gradient."""
    q, k = _given(tensors, "q").detach(), _given(tensors, "k").detach()
    weights = _given(tensors, "weights").detach() if spec.weighted else None
    parts = [
        _heads(q[:, i : i + QUERIES], k, None if weights is None else weights[:, i : i + QUERIES], spec)
        for i in range(0, q.shape[1], QUERIES)
    ]
    scores = torch.cat(parts, 1) if parts else q.new_zeros(q.shape[0], 0, k.shape[1])
    # zeros of both signs are equal
    return (scores + 0.0).masked_fill(~seen(tensors, k.shape[1]), float("-inf"))


def chosen(scores: Tensor, visible: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Index [B, S, K], ascending, -1 past count [B, S]; of equal scores the first are taken."""
    count = visible.sum(-1).clamp_max(slots)
    # what is not visible goes behind any score, minus infinity included
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(
        -1, visible.gather(-1, order).to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    )
    taken = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    best = order.masked_fill(~taken, scores.shape[-1]).sort(-1).values[..., :slots]
    best = torch.nn.functional.pad(best, (0, slots - best.shape[-1]), value=scores.shape[-1])
    return best.masked_fill(best == scores.shape[-1], -1), count


def undecided(scores: Tensor, visible: Tensor, slots: int, tensors: Tensors, spec: Spec) -> Tensor:
    """Pairs [B, S, T] whose score lies so close to the last chosen one, without being it, that fp32 may swap them."""
    keys = scores.shape[-1]
    if slots >= keys or slots == 0 or scores.numel() == 0:
        return torch.zeros_like(visible)
    q, k = _given(tensors, "q").detach(), _given(tensors, "k").detach()
    size = q.norm(dim=-1) * k.norm(dim=-1).amax(-1)[:, None, None]
    size = size * _given(tensors, "weights").detach().abs() if spec.weighted else size
    margin = (NEARNESS * q.shape[-1] ** -0.5 * size.sum(-1)).unsqueeze(-1)
    best = scores.topk(slots + 1, dim=-1).values
    last, left_out = best[..., -2:-1], best[..., -1:]
    near = ((scores - last).abs() < margin) | ((scores - left_out).abs() < margin)
    near &= visible & left_out.isfinite() & (last - left_out < margin)
    low = scores.masked_fill(~near, float("inf")).amin(-1, keepdim=True)
    high = scores.masked_fill(~near, float("-inf")).amax(-1, keepdim=True)
    # equal ones alone are decided by their index
    found: Tensor = near & (low < high)
    return found


def _gathered(k: Tensor, index: Tensor) -> Tensor:
    """k [B, T, D] of each query's slots [B, S, K, D]; key 0 where there is none."""
    at = index.clamp_min(0).flatten(1).unsqueeze(-1).expand(-1, -1, k.shape[-1])
    return k.gather(1, at).reshape(*index.shape, k.shape[-1])


def _divergence(tensors: Tensors) -> Tensor:
    """KL(p || softmax(I)) over the slots in use [B, S], p the target over its sum; 0 for rows without one."""
    scores, target, count = (_given(tensors, name) for name in ("scores", "target", "count"))
    slots = scores.shape[-1]
    used = torch.arange(slots, device=scores.device) < count.unsqueeze(-1)
    target = torch.where(used, target.to(scores.dtype), 0.0)
    mass = target.sum(-1, keepdim=True)
    p = target / torch.where(mass > 0, mass, 1.0)
    # a row without slots in use must not divide by zero
    inside = used | ~used.any(-1, keepdim=True)
    log_q = scores.masked_fill(~inside, float("-inf")).log_softmax(-1)
    log_p = torch.where(p > 0, p, 1.0).log()
    return torch.where(p > 0, p * (log_p - torch.where(p > 0, log_q, 0.0)), 0.0).sum(-1)


def _pooled(tensors: Tensors) -> Tensor:
    """Keys of pools [B, P, D]: sum_j softmax_j(gate_j + bias_j) k_j for each channel; 0 for pools out of range."""
    k, gate, bias, start = (_given(tensors, name) for name in ("k", "gate", "bias", "start"))
    size, tokens = bias.shape[0], k.shape[1]
    inside = ((start >= 0) & (start + size <= tokens))[..., None, None]
    if tokens == 0 or start.numel() == 0:
        return k.new_zeros(*start.shape, k.shape[-1]) + 0.0 * (k.sum() + gate.sum() + bias.sum())
    at = (start.unsqueeze(-1) + torch.arange(size, device=k.device)).clamp(0, tokens - 1)
    shares = (_gathered(gate, at) + bias).softmax(2)
    found: Tensor = torch.where(inside, shares * _gathered(k, at), 0.0).sum(2)
    return found


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """scores, index and count, all as numbers in fp32 or, for fp64 inputs, fp64; loss [B, S] or pooled [B, P, D]."""
    if spec.operation == "objective":
        return {"loss": _divergence(tensors)}
    if spec.operation == "compression":
        return {"pooled": _pooled(tensors)}
    slots, keys = _given(tensors, "slots").shape[0], _given(tensors, "k").shape[1]
    index, count = chosen(all_scores(tensors, spec), seen(tensors, keys), slots)
    return _outputs(tensors, index, count, spec)


def _outputs(tensors: Tensors, index: Tensor, count: Tensor, spec: Spec) -> dict[str, Tensor]:
    q, k = _given(tensors, "q"), _given(tensors, "k")
    weights = _given(tensors, "weights") if spec.weighted else None
    if k.shape[1] == 0:
        scores = q.sum() * 0.0 + q.new_zeros(index.shape)
    else:
        scores = torch.where(index >= 0, _heads(q, _gathered(k, index), weights, spec), 0.0)
    return {"scores": scores, "index": index.to(q.dtype), "count": count.to(q.dtype)}


class _Chosen(torch.autograd.Function):
    """Scores of chosen keys; backward rounds where the kernel does: dz before its products, each key's part once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, index: Tensor, spec: Spec, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(q, k, weights, index)
        ctx.spec, ctx.dtype = spec, dtype
        return torch.where(index >= 0, _heads(q, _gathered(k, index), weights if spec.weighted else None, spec), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights, index = ctx.saved_tensors
        dq, dk, dweights = torch.empty_like(q), torch.zeros_like(k), torch.empty_like(weights)
        for i in range(0, q.shape[1], QUERIES):
            rows = slice(i, i + QUERIES)
            at, ours = index[:, rows], _gathered(k, index[:, rows])
            g = torch.where(at >= 0, grads[0][:, rows], 0.0).unsqueeze(2) * q.shape[-1] ** -0.5
            z = torch.einsum("bshd,bskd->bshk", q[:, rows], ours)
            relu = ctx.spec.activation == "relu"
            dweights[:, rows] = ((z.relu() if relu else z) * g).sum(-1)
            dz = (g * weights[:, rows].unsqueeze(-1) if ctx.spec.weighted else g.expand_as(z)) * (
                (z > 0) if relu else torch.ones_like(z)
            )
            dz = dz.to(ctx.dtype).to(z.dtype)
            dq[:, rows] = torch.einsum("bshk,bskd->bshd", dz, ours)
            part = torch.einsum("bshk,bshd->bskd", dz, q[:, rows]).to(ctx.dtype).to(k.dtype)
            part = part * (at >= 0).unsqueeze(-1)
            dk.scatter_add_(1, at.clamp_min(0).flatten(1).unsqueeze(-1).expand(-1, -1, k.shape[-1]), part.flatten(1, 2))
        return dq, dk, dweights if ctx.spec.weighted else None, None, None, None


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernels' algorithm: fp32 sums of products of ``mma_dtype``; gradients of products rounded before the next.

    Where fp32 may order keys either way, this takes the other order: such inputs are no evidence.
    """
    if spec.operation == "objective":
        return reference(tensors, spec)
    stored: Tensors = dict(tensors)
    if spec.operation == "compression":
        stored |= {name: rounded(_given(tensors, name), mma_dtype) for name in ("k", "gate", "bias")}
        return {"pooled": rounded(_pooled(stored), mma_dtype)}
    for name in ("q", "k", *(["weights"] if spec.weighted else [])):
        stored[name] = rounded(_given(tensors, name), mma_dtype)
    slots, keys = _given(tensors, "slots").shape[0], _given(tensors, "k").shape[1]
    wide: Tensors = {n: t if t is None or not t.is_floating_point() else t.detach().double() for n, t in stored.items()}
    scores, visible = all_scores(wide, spec), seen(tensors, keys)
    near = undecided(scores, visible, slots, wide, spec)
    turned = torch.where(near, scores.masked_fill(~near, float("-inf")).amax(-1, keepdim=True)
                         + scores.masked_fill(~near, float("inf")).amin(-1, keepdim=True) - scores, scores)  # fmt: skip
    index, count = chosen(turned, visible, slots)
    q, k = _given(stored, "q"), _given(stored, "k")
    if keys == 0:
        return _outputs(stored, index, count, spec)
    weights = _given(stored, "weights") if spec.weighted else q.new_ones(q.shape[:3])
    found: Tensor = _Chosen.apply(q, k, weights, index, spec, mma_dtype)  # type: ignore[no-untyped-call]
    return {"scores": found, "index": index.to(q.dtype), "count": count.to(q.dtype)}
