"""Routed gated experts in plain torch: the exact definition, and the kernel's algorithm with its roundings.

Tensors (names as in ``Spec.inputs``): x [T, D], index [T, K] int64, scores [T, K], gate_up [E, 2I, D] and down
[E, D, I] (``transposed``: [E, D, 2I] and [E, I, D]), biases gate_up_bias [E, 2I] and down_bias [E, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_templates.moe.spec import Spec

Tensors = Mapping[str, Tensor | None]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """y [T, D], y_t = sum_j s_tj (W2_e a(W1_e x_t + b1_e) + b2_e) with e = index_tj; any float dtype, differentiable.

    Slots whose index is negative or >= E add nothing; their scores get a zero gradient.
    """
    x, index, scores, gate_up, down, up_bias, down_bias = _arguments(tensors, spec)
    rows, slots = [], []
    for expert, slot in _slots_by_expert(index, len(gate_up)):
        h = x[slot // index.shape[1]] @ gate_up[expert].T
        if up_bias is not None:
            h = h + up_bias[expert]
        row = _gated(*_pair(h, spec), spec) @ down[expert].T
        if down_bias is not None:
            row = row + down_bias[expert]
        rows.append(row)
        slots.append(slot)
    # empty slices tie every input into the graph, so that one which no token reached gets a zero gradient
    y = torch.zeros_like(x)
    for tensor in (x, scores, gate_up, down, up_bias, down_bias):
        if tensor is not None:
            y = y + tensor[:0].sum()
    if rows:
        slot = torch.cat(slots)
        y = y.index_add(0, slot // index.shape[1], torch.cat(rows) * scores.reshape(-1)[slot, None])
    return {"y": y}


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The kernel's algorithm, forward and backward, with what it keeps in ``mma_dtype`` rounded; sums at least in fp32.

    The tile sizes in ``config`` change only the order of sums.
    """
    del config
    y: Tensor = _RoundedExperts.apply(*_arguments(tensors, spec), spec, mma_dtype)  # type: ignore[no-untyped-call]
    return {"y": y}


def _arguments(
    tensors: Tensors, spec: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors in order, weights as [E, out, in]."""
    x, index, scores = (_required(tensors, n) for n in ("x", "index", "scores"))
    gate_up, down = _required(tensors, "gate_up"), _required(tensors, "down")
    if spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not spec.bias:
        return x, index, scores, gate_up, down, None, None
    return x, index, scores, gate_up, down, _required(tensors, "gate_up_bias"), _required(tensors, "down_bias")


def _required(tensors: Tensors, name: str) -> Tensor:
    value = tensors[name]
    if value is None:
        raise ValueError(f"{name} is required")
    return value


def _slots_by_expert(index: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Every expert that has slots, with their numbers t K + j in order."""
    flat = index.reshape(-1)
    for expert in range(experts):
        slot = torch.nonzero(flat == expert).squeeze(1)
        if len(slot):
            yield expert, slot


def _pair(h: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Gate and up [R, I] of h [R, 2I]."""
    if spec.gate_up_layout == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    gate, up = h.chunk(2, dim=1)
    return gate, up


def _features(gate: Tensor, up: Tensor, spec: Spec) -> Tensor:
    """The inverse of :func:`_pair`."""
    if spec.gate_up_layout == "interleaved":
        return torch.stack([gate, up], 2).flatten(1)
    return torch.cat([gate, up], 1)


def _gated(gate: Tensor, up: Tensor, spec: Spec) -> Tensor:
    """act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), any shape."""
    if spec.limit is not None:
        gate = gate.clamp(max=spec.limit)
        up = up.clamp(min=-spec.limit, max=spec.limit)
    if spec.activation == "silu":
        value = gate * torch.sigmoid(spec.alpha * gate)
    else:
        value = _ACTIVATIONS[spec.activation](gate)
    return value * (up + spec.up_offset)


class _RoundedExperts(torch.autograd.Function):
    """Narrow: operands of products, h, a, every expert's output, da', dh, s a, dx by slot, all results.

    The gradient of a score is <W2^T dy, a>, as in the kernel, with a recomputed from the rounded h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        scores: Tensor,
        gate_up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        spec: Spec,
        dtype: torch.dtype,
    ) -> Tensor:
        def narrow(value: Tensor) -> Tensor:
            return value.to(dtype).to(wide)

        wide, given = torch.promote_types(x.dtype, torch.float32), x.dtype
        ctx.spec, ctx.narrow, ctx.hidden, ctx.wide = spec, narrow, {}, wide
        ctx.given = [t if t is None else t.dtype for t in (x, None, scores, gate_up, down, up_bias, down_bias)]
        x, scores, gate_up, down = narrow(x), scores.to(wide), narrow(gate_up), narrow(down)
        if up_bias is not None and down_bias is not None:
            up_bias, down_bias = up_bias.to(wide), down_bias.to(wide)
        limit = torch.inf if spec.limit is None else spec.limit
        y = torch.zeros_like(x)
        for expert, slot in _slots_by_expert(index, len(gate_up)):
            token = slot // index.shape[1]
            h = x[token] @ gate_up[expert].T
            if up_bias is not None:
                h = h + up_bias[expert]
            gate, up = _pair(h, spec)
            row = narrow(_gated(gate, up, spec)) @ down[expert].T
            if down_bias is not None:
                row = row + down_bias[expert]
            y.index_add_(0, token, narrow(row) * scores.reshape(-1)[slot, None])
            ctx.hidden[expert] = _kept(gate, -torch.inf, limit, narrow), _kept(up, -limit, limit, narrow)
        ctx.save_for_backward(x, index, scores, gate_up, down, up_bias, down_bias)
        return narrow(y).to(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, index, scores, gate_up, down, up_bias, down_bias = ctx.saved_tensors
        spec, narrow = ctx.spec, ctx.narrow
        dy = narrow(grads[0].to(ctx.wide))
        dx, dscores = torch.zeros_like(x), torch.zeros_like(scores).reshape(-1)
        dgate_up, ddown = torch.zeros_like(gate_up), torch.zeros_like(down)
        dup_bias = None if up_bias is None else torch.zeros_like(up_bias)
        ddown_bias = None if down_bias is None else torch.zeros_like(down_bias)
        for expert, slot in _slots_by_expert(index, len(gate_up)):
            token = slot // index.shape[1]
            score = scores.reshape(-1)[slot, None]
            da = narrow(dy[token] @ down[expert])
            with torch.enable_grad():
                gate, up = (part.requires_grad_() for part in ctx.hidden[expert])
                a = _gated(gate, up, spec)
                dgate, dup = torch.autograd.grad(a, (gate, up), score * da)
            a = a.detach()
            dh = narrow(_features(dgate, dup, spec))
            dscores[slot] = (da * a).sum(1)
            dx.index_add_(0, token, narrow(dh @ gate_up[expert]))
            dgate_up[expert] = narrow(dh.T @ x[token])
            ddown[expert] = narrow(dy[token].T @ narrow(score * a))
            if dup_bias is not None and ddown_bias is not None and down_bias is not None:
                dscores[slot] += dy[token] @ down_bias[expert]
                dup_bias[expert] = narrow(dh.sum(0))
                ddown_bias[expert] = narrow((score * dy[token]).sum(0))
        gradients = narrow(dx), None, narrow(dscores).reshape(scores.shape), dgate_up, ddown, dup_bias, ddown_bias
        found = [g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.given, strict=True)]
        return (*found, None, None)


def _kept(value: Tensor, low: float, high: float, narrow: Callable[[Tensor], Tensor]) -> Tensor:
    """``value`` rounded, but on the side of each limit where it was: its clamp and the gradient of it stay right."""
    kept = narrow(value).clamp(min=low, max=high)
    kept = torch.where(value > high, 2 * high, kept)
    return torch.where(value < low, 2 * low, kept)
