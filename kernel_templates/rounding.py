"""Rounding inside a reference: what a kernel keeps in a narrow dtype, a rounded reference must round too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Rounded(torch.autograd.Function):
    """Rounds the value in forward and the gradient in backward; both stay in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype) -> Tensor:
        ctx.gradient_dtype = gradient_dtype
        return x.to(dtype).to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad.to(ctx.gradient_dtype).to(grad.dtype), None, None


def rounded(x: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None) -> Tensor:
    """``x`` rounded to nearest even in ``dtype``, kept in its own dtype, any shape.

    The gradient is rounded to ``gradient_dtype``, by default the same dtype: a kernel that feeds ``x`` to a matrix
    product in bf16 feeds its gradient in bf16 as well. Pass ``torch.float32`` where the kernel keeps the gradient
    in fp32.
    """
    result: Tensor = _Rounded.apply(x, dtype, gradient_dtype or dtype)  # type: ignore[no-untyped-call]
    return result
