"""Gated activations in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_templates.gated_activation.spec import Spec
from kernel_templates.rounding import rounded

Tensors = dict[str, Tensor | None]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input in fp32, or in fp64 if it is fp64.

    Raises:
        ValueError: it is missing.
    """
    t = tensors[name]
    if t is None:
        raise ValueError(f"{name} is missing")
    return t.to(torch.promote_types(t.dtype, torch.float32))


def parted(both: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """gate and up [..., I] of gate_up [..., 2I]."""
    if layout == "concatenated":
        gate, up = both.chunk(2, dim=-1)
        return gate, up
    return both[..., 0::2], both[..., 1::2]


def _gated(gate: Tensor, up: Tensor, spec: Spec) -> Tensor:
    if spec.limit is not None:
        gate = gate.clamp(max=spec.limit)
        up = up.clamp(-spec.limit, spec.limit)
    if spec.activation == "silu":
        value = gate * torch.sigmoid(spec.alpha * gate)
    else:
        value = _ACTIVATIONS[spec.activation](gate)
    return value * (up + spec.up_offset)


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """y [..., I], computed in fp32 or, for fp64 inputs, fp64."""
    if spec.layout == "separate":
        return {"y": _gated(_given(tensors, "gate"), _given(tensors, "up"), spec)}
    return {"y": _gated(*parted(_given(tensors, "gate_up"), spec.layout), spec)}


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: fp32 inside, y and the gradients rounded once to ``mma_dtype``, the storage dtype."""
    if spec.layout == "separate":
        gate, up = (rounded(_given(tensors, n), mma_dtype) for n in ("gate", "up"))
    else:
        gate, up = parted(rounded(_given(tensors, "gate_up"), mma_dtype), spec.layout)
    return {"y": rounded(_gated(gate, up, spec), mma_dtype)}
