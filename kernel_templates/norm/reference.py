"""RMSNorm and LayerNorm in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_templates.norm.spec import Spec
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


def _normalised(h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, spec: Spec) -> Tensor:
    """h * rsqrt(mean(h^2) + eps) * scale (+ bias) * act(gate), over the last dim, in the dtype of h [..., D]."""
    if spec.centred:
        h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + spec.eps)
    if weight is not None:
        y = y * (1 + weight if spec.offset else weight)
    if bias is not None:
        y = y + bias
    if gate is not None:
        y = y * (torch.sigmoid(gate) if spec.gate == "sigmoid" else torch.nn.functional.silu(gate))
    return y


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """y [..., D] and, with a fused add, residual_out [..., D]; computed in fp32 or, for fp64 inputs, fp64."""
    h = _wide(tensors["x"])
    if spec.residual:
        h = h + _wide(tensors["residual"])
    weight = _wide(tensors["weight"]) if spec.weighted else None
    bias = _wide(tensors["bias"]) if spec.bias else None
    gate = _wide(tensors["gate"]) if spec.gate != "none" else None
    outputs = {"y": _normalised(h, weight, bias, gate, spec)}
    if spec.residual:
        outputs["residual_out"] = h
    return outputs


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: the sum of x and residual is stored, so rounded, before it is normalised.

    ``mma_dtype`` is the storage dtype here: there are no matrix products. Gradients are rounded once, at the end; the
    sum's gradient stays in fp32 on its way.
    """

    def stored(name: str) -> Tensor:
        return rounded(_wide(tensors[name]), mma_dtype)

    h = stored("x")
    if spec.residual:
        h = rounded(h + stored("residual"), mma_dtype, gradient_dtype=torch.float32)
    weight = stored("weight") if spec.weighted else None
    bias = stored("bias") if spec.bias else None
    gate = stored("gate") if spec.gate != "none" else None
    outputs = {"y": rounded(_normalised(h, weight, bias, gate, spec), mma_dtype)}
    if spec.residual:
        outputs["residual_out"] = h
    return outputs
