"""The short convolution in plain torch: the exact definition, and the kernel's algorithm with its roundings."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernel_templates.rounding import rounded
from kernel_templates.short_convolution.spec import Spec

Tensors = dict[str, Tensor | None]


def reference(tensors: Tensors, spec: Spec) -> dict[str, Tensor]:
    """y [B, T, D], and final_state [N, D, W - 1] with states; computed in fp32 or, for fp64 inputs, fp64.

    Raises:
        ValueError: a tensor that the spec asks for is missing.
    """

    def wide(name: str) -> Tensor | None:
        t = tensors.get(name)
        return None if t is None else t.to(torch.promote_types(t.dtype, torch.float32))

    return _convolved(wide("x"), wide("weight"), wide("bias"), wide("initial_state"), tensors.get("cu_seqlens"), spec)


def rounded_reference(
    tensors: Tensors, spec: Spec, mma_dtype: torch.dtype, config: dict[str, object]
) -> dict[str, Tensor]:
    """The kernel's algorithm: inputs as stored, everything between them and the output in fp32, one rounding."""

    def stored(name: str) -> Tensor | None:
        t = tensors.get(name)
        return None if t is None else rounded(t.to(torch.promote_types(t.dtype, torch.float32)), mma_dtype)

    found = _convolved(
        stored("x"), stored("weight"), stored("bias"), stored("initial_state"), tensors.get("cu_seqlens"), spec
    )
    return {name: rounded(value, mma_dtype) for name, value in found.items()}


def _convolved(
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: Spec,
) -> dict[str, Tensor]:
    if x is None or weight is None or (spec.bias and bias is None):
        raise ValueError("an input that the spec asks for is missing")
    batch, _, channels = x.shape
    if cu_seqlens is None:
        sequences = [x[b] for b in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [x[0, a:b] for a, b in pairwise(bounds)]
    outputs, finals = [], []
    for n, rows in enumerate(sequences):
        before = x.new_zeros(spec.width - 1, channels) if state is None else state[n].T
        window = torch.cat([before, rows])
        y = sum(window[w : w + rows.shape[0]] * weight[:, w] for w in range(spec.width))
        assert isinstance(y, Tensor)
        outputs.append(y if bias is None else y + bias)
        finals.append(window[rows.shape[0] :].T)
    pre = torch.cat(outputs).reshape(x.shape) if outputs else x.new_zeros(x.shape) * weight.sum()
    result = {"y": torch.nn.functional.silu(pre) if spec.activation == "silu" else pre}
    if spec.states:
        result["final_state"] = torch.stack(finals) if finals else x.new_zeros(0, channels, spec.width - 1)
    return result
