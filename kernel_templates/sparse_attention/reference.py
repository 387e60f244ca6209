"""Attention over listed keys in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_templates.sparse_attention.spec import Spec

Tensors = dict[str, Tensor | None]


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input that the spec asks for.

    Raises:
        ValueError: it is missing.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"the input {name} is missing")
    return tensor


def _wide(tensors: Tensors, name: str) -> Tensor:
    """The input in fp32, or in fp64 where it is fp64."""
    tensor = _given(tensors, name)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def scale_of(tensors: Tensors, spec: Spec) -> float:
    """The factor on the scores."""
    if spec.scale is not None:
        return spec.scale
    width = _given(tensors, "q").shape[2] + (_given(tensors, "q_rope").shape[2] if spec.rope else 0)
    return float(width**-0.5)


def times_listed(index: Tensor, groups: int, keys: int) -> Tensor:
    """How often each key stands in a list: [T, G, S] int64 of index [T, K] or [T, G, K]; others than keys drop out."""
    lists = index[:, None] if index.ndim == 2 else index
    lists = lists.long().expand(-1, groups, -1)
    inside = (lists >= 0) & (lists < keys)
    times = torch.zeros(len(lists), groups, keys + 1, dtype=torch.int64, device=index.device)
    return times.scatter_add_(2, torch.where(inside, lists, keys), torch.ones_like(lists))[..., :keys]


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """o [T, H, V] (and target, of index's shape), in fp32 or, for fp64 inputs, fp64.

    All keys are scored and those that are not listed masked: nothing here gathers, unlike the kernels.
    """
    q, k, index = _wide(tensors, "q"), _wide(tensors, "k"), _given(tensors, "index")
    v = _wide(tensors, "v") if spec.separate else k
    tokens, heads, _ = q.shape
    keys, groups, _ = k.shape
    scores = torch.einsum("tgnd,sgd->tgns", q.reshape(tokens, groups, heads // groups, q.shape[-1]), k)
    if spec.rope:
        q_rope = _wide(tensors, "q_rope")
        # no -1: with no tokens nothing says how wide a head is
        q_rope = q_rope.reshape(tokens, groups, heads // groups, q_rope.shape[-1])
        scores = scores + torch.einsum("tgnd,sgd->tgns", q_rope, _wide(tensors, "k_rope"))
    times = times_listed(index, groups, keys)
    seen = times[:, :, None] > 0
    # a key listed n times is n keys: its logit grows by log n
    scores = scores * scale_of(tensors, spec) + times.clamp(min=1).to(q).log()[:, :, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if spec.sink:
        sink = _wide(tensors, "sink").view(1, groups, heads // groups, 1).expand(tokens, -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    if scores.shape[-1]:
        # rows without any key: all probabilities are zero
        top = scores.detach().amax(-1, keepdim=True)
        powers = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
        total = powers.sum(-1, keepdim=True)
        p = (powers / torch.where(total == 0, 1.0, total))[..., :keys]
    else:
        p = scores
    outputs = {"o": torch.einsum("tgns,sgv->tgnv", p, v).flatten(1, 2)}
    if spec.target:
        outputs["target"] = _by_slot(p.detach(), times, index)
    return outputs


def _by_slot(p: Tensor, times: Tensor, index: Tensor) -> Tensor:
    """Probabilities [T, G, N, S] at the slots of the lists, summed over the heads that share a list."""
    shared = index.ndim == 2
    weights = (p / times.clamp(min=1)[:, :, None]).sum(2)
    weights = weights.sum(1) if shared else weights
    keys = weights.shape[-1]
    inside = (index >= 0) & (index < keys)
    if keys == 0:
        return weights.new_zeros(index.shape)
    found = weights.gather(-1, torch.where(inside, index, 0).long())
    return torch.where(inside, found, torch.zeros_like(found))


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm, with inputs, P, dS, each slot's gradient and the results rounded to ``mma_dtype``.

    Statistics, delta and the sums over a key's slots stay in fp32.
    """
    names = [role.name for role in spec.inputs() if role.name != "index"]
    index = _given(tensors, "index")
    given = [_given(tensors, n) for n in names]
    o: Tensor = _Rounded.apply(spec, mma_dtype, index, scale_of(tensors, spec), *given)  # type: ignore[no-untyped-call]
    outputs = {"o": o}
    if spec.target:
        with torch.no_grad():
            narrow = {
                n: None if t is None or n in ("index", "sink") else t.to(mma_dtype).to(t) for n, t in tensors.items()
            }
            target = reference(narrow | {"index": index, "sink": tensors.get("sink")}, spec)["target"]
        outputs["target"] = target
    return outputs


class _Rounded(torch.autograd.Function):
    """Query by query over gathered rows, with the roundings of the kernels."""

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, dtype: torch.dtype, index: Tensor, scale: float, q: Tensor, k: Tensor, *others: Tensor
    ) -> Tensor:
        names = [role.name for role in spec.inputs() if role.name != "index"]
        given = dict(zip(names, (q, k, *others), strict=True))
        wide = torch.promote_types(q.dtype, torch.float32)

        def narrow(value: Tensor) -> Tensor:
            return value.to(dtype).to(wide)

        kept = {n: t.to(wide) if n == "sink" else narrow(t) for n, t in given.items()}
        ctx.spec, ctx.narrow, ctx.scale, ctx.names = spec, narrow, scale, names
        ctx.dtypes = [t.dtype for t in given.values()]
        groups = k.shape[1]
        v = kept["v"] if spec.separate else kept["k"]
        o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=wide, device=q.device)
        ctx.rows = _rows(index, groups, len(k))
        ctx.lse = {}
        for t, g, rows in ctx.rows:
            heads = _heads(q, g, groups)
            s = _scores(kept, t, g, heads, rows, scale)
            ends = [s] if "sink" not in kept else [s, kept["sink"][heads, None]]
            lse = torch.logsumexp(torch.cat(ends, 1), 1, keepdim=True)
            ctx.lse[t, g] = lse
            if len(rows):
                top = s.amax(1, keepdim=True)
                o[t, heads] = (narrow((s - top).exp()) @ v[rows, g]) * (top - lse).exp()
        o = narrow(o)
        ctx.save_for_backward(o, *kept.values())
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        o, *values = ctx.saved_tensors
        spec, narrow, scale = ctx.spec, ctx.narrow, ctx.scale
        kept = dict(zip(ctx.names, values, strict=True))
        do = narrow(grads[0].to(o))
        found = {n: torch.zeros_like(t) for n, t in kept.items()}
        v = "v" if spec.separate else "k"
        for t, g, rows in ctx.rows:
            heads = _heads(o, g, kept["k"].shape[1])
            delta = (do[t, heads] * o[t, heads]).sum(1, keepdim=True)
            lse = ctx.lse[t, g]
            if spec.sink:
                found["sink"][heads] -= ((kept["sink"][heads, None] - lse).exp() * delta)[:, 0]
            if len(rows) == 0:
                continue
            p = (_scores(kept, t, g, heads, rows, scale) - lse).exp()
            ds = narrow(p * (do[t, heads] @ kept[v][rows, g].T - delta) * scale)
            p = narrow(p)
            found["q"][t, heads] = ds @ kept["k"][rows, g]
            dk = ds.T @ kept["q"][t, heads]
            dv = p.T @ do[t, heads]
            if spec.separate:
                found["v"][:, g].index_add_(0, rows, narrow(dv))
            else:
                dk = dk + dv
            found["k"][:, g].index_add_(0, rows, narrow(dk))
            if spec.rope:
                found["q_rope"][t, heads] = ds @ kept["k_rope"][rows, g]
                found["k_rope"][:, g].index_add_(0, rows, narrow(ds.T @ kept["q_rope"][t, heads]))
        gradients = [narrow(found[n]).to(dtype) for n, dtype in zip(ctx.names, ctx.dtypes, strict=True)]
        return (None, None, None, None, *gradients)


def _rows(index: Tensor, groups: int, keys: int) -> list[tuple[int, int, Tensor]]:
    """For every query and key head: both, and the keys of its list."""
    found = []
    for t, row in enumerate(index):
        for g in range(groups):
            listed = row if row.ndim == 1 else row[g]
            inside = listed[(listed >= 0) & (listed < keys)].long()
            found.append((t, g, inside))
    return found


def _heads(q: Tensor, group: int, groups: int) -> slice:
    """The query heads [T, H, ..] of one key head."""
    each = q.shape[1] // groups
    return slice(group * each, (group + 1) * each)


def _scores(kept: dict[str, Tensor], t: int, g: int, heads: slice, rows: Tensor, scale: float) -> Tensor:
    """Scores [N, K] of one query's heads with the keys of its list."""
    s = kept["q"][t, heads] @ kept["k"][rows, g].T
    if "q_rope" in kept:
        s = s + kept["q_rope"][t, heads] @ kept["k_rope"][rows, g].T
    return s * scale
