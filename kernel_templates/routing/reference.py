"""A router's choice in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_templates.rounding import rounded
from kernel_templates.routing.spec import Spec

Tensors = dict[str, Tensor | None]


def _given(tensors: Tensors, name: str) -> Tensor:
    """An input in fp32, or in fp64 if it is fp64.

    Raises:
        ValueError: it is missing.
    """
    t = tensors[name]
    if t is None:
        raise ValueError(f"{name} is missing")
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def activated(z: Tensor, spec: Spec) -> Tensor:
    """Scores of logits [..., E]."""
    if spec.activation == "softmax":
        return z.softmax(-1)
    return torch.sigmoid(z) if spec.activation == "sigmoid" else F.softplus(z).sqrt()


def _best(keys: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest keys, best first, of equal ones the first."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def keys_of(z: Tensor, bias: Tensor | None, spec: Spec) -> Tensor:
    """By which experts are compared [N, E]; without a bias scores order as their logits do."""
    keys = z if bias is None and (spec.groups == 1 or spec.group_score == "max") else activated(z, spec)
    return keys if bias is None else keys + bias


def chosen(z: Tensor, bias: Tensor | None, count: int, spec: Spec) -> Tensor:
    """Index [N, K] of the experts of each row."""
    keys = keys_of(z, bias, spec)
    if spec.groups > 1:
        parts = keys.reshape(*keys.shape[:-1], spec.groups, keys.shape[-1] // spec.groups)
        best = parts.topk(2 if spec.group_score == "top2" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _best(best, spec.top_groups), True)
        keys = parts.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    return _best(keys, count)


def _weights(z: Tensor, index: Tensor, spec: Spec) -> Tensor:
    weights = activated(z, spec).gather(-1, index)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps)
    return weights * spec.scale


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """scores and index [N, K], both as numbers in fp32 or, for fp64 inputs, fp64."""
    z = _given(tensors, "logits")
    bias = _given(tensors, "bias") if spec.bias else None
    index = chosen(z.detach(), bias, _given(tensors, "slots").shape[0], spec)
    return {"scores": _weights(z, index, spec), "index": index.to(z.dtype)}


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: fp32 inside; scores and dlogits rounded once to ``mma_dtype``, the storage dtype."""
    # the bias is kept in fp32
    stored = tensors | {"logits": rounded(_given(tensors, "logits"), mma_dtype)}
    found = reference(stored, spec)
    return {"scores": rounded(found["scores"], mma_dtype), "index": found["index"]}
