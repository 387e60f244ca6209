"""Routed gated experts in plain torch: the exact definition, and the kernel's algorithm with its roundings.

Tensors (names as in ``Spec.inputs``): x [T, D], index [T, K] int64, scores [T, K], gate_up [E, 2I, D] and down
[E, D, I] (``transposed``: [E, D, 2I] and [E, I, D]), biases gate_up_bias [E, 2I] and down_bias [E, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_templates.moe.spec import Spec
from kernel_templates.rounding import rounded

Tensors = Mapping[str, Tensor | None]
Rounding = Callable[[Tensor], Tensor]

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
    return {"y": _experts(tensors, spec, _exact, _exact, _exact)}


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The kernel's algorithm: x, weights, h, a and each expert's output rounded to ``mma_dtype``, sums in the tensors' dtype.

    Gradients: dh, dx per slot and the weight gradients are rounded; the score multiplies in full precision. The tile
    sizes in ``config`` change the order of sums only, which the rounding of operands does not see.
    """
    del config

    def both(x: Tensor) -> Tensor:
        return rounded(x, mma_dtype)

    def value_only(x: Tensor) -> Tensor:
        # da stays in registers, dy is used as it comes
        return rounded(x, mma_dtype, x.dtype)

    return {"y": value_only(_experts(tensors, spec, both, both, value_only))}


def _exact(x: Tensor) -> Tensor:
    return x


def _tensor(tensors: Tensors, name: str) -> Tensor:
    value = tensors[name]
    if value is None:
        raise ValueError(f"{name} is required")
    return value


def _gated(gate: Tensor, up: Tensor, spec: Spec, h_rounding: Rounding) -> Tensor:
    """act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), any shape; rounded after the clamps."""
    if spec.limit is not None:
        gate = gate.clamp(max=spec.limit)
        up = up.clamp(min=-spec.limit, max=spec.limit)
    gate, up = h_rounding(gate), h_rounding(up)
    if spec.activation == "silu":
        value = gate * torch.sigmoid(spec.alpha * gate)
    else:
        value = _ACTIVATIONS[spec.activation](gate)
    return value * (up + spec.up_offset)


def _experts(tensors: Tensors, spec: Spec, operand: Rounding, h_rounding: Rounding, a_rounding: Rounding) -> Tensor:
    x, index, scores = _tensor(tensors, "x"), _tensor(tensors, "index"), _tensor(tensors, "scores")
    gate_up, down = operand(_tensor(tensors, "gate_up")), operand(_tensor(tensors, "down"))
    if spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    experts, top_k = gate_up.shape[0], index.shape[1]
    flat = index.reshape(-1)
    rows = []
    slots = []
    for expert in range(experts):
        slot = torch.nonzero(flat == expert).squeeze(1)
        if slot.numel() == 0:
            continue
        h = operand(x[slot // top_k]) @ gate_up[expert].T
        if spec.bias:
            h = h + _tensor(tensors, "gate_up_bias")[expert]
        if spec.gate_up_layout == "interleaved":
            gate, up = h[:, 0::2], h[:, 1::2]
        else:
            gate, up = h.chunk(2, dim=1)
        out = a_rounding(_gated(gate, up, spec, h_rounding)) @ down[expert].T
        if spec.bias:
            out = out + _tensor(tensors, "down_bias")[expert]
        rows.append(a_rounding(out))
        slots.append(slot)
    # empty slices tie every input into the graph, so that one which no token reached gets a zero gradient
    y = torch.zeros_like(x) + x[:0].sum() + scores[:0].sum() + gate_up[:0].sum() + down[:0].sum()
    if spec.bias:
        y = y + _tensor(tensors, "gate_up_bias")[:0].sum() + _tensor(tensors, "down_bias")[:0].sum()
    if not rows:
        return y
    slot = torch.cat(slots)
    weighted = torch.cat(rows) * scores.reshape(-1)[slot, None]
    return y.index_add(0, slot // top_k, weighted)
