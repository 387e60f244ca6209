"""Two adjoint ways to move rows, without atomics: every sum has a fixed order.

Legend: R source rows, S copies of them, M the most copies of one row, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def copy_rows(x: Tensor, source: Tensor) -> Tensor:
    """Rows of ``x`` [R, D] in the order of ``source`` [S]."""
    return x.index_select(0, source)


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """Sum the copies of each row, column by column of ``places``.

    Args:
        y: [S, D].
        places: int64 [R, M], where a row's copies lie in ``y``; -1 for none.

    Returns:
        [R, D], summed in fp32 or wider and rounded once.
    """
    if not y.shape[0]:
        return y.new_zeros((places.shape[0], *y.shape[1:]))
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    total = torch.zeros((places.shape[0], *y.shape[1:]), dtype=wide, device=y.device)
    for column in places.unbind(1):
        rows = y.index_select(0, column.clamp(min=0))
        total += rows.masked_fill_((column < 0).view(-1, *[1] * (y.ndim - 1)), 0)
    return total.to(y.dtype)


class _CopyRows(torch.autograd.Function):
    """``copy_rows`` with ``sum_rows`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return copy_rows(x, source)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (places,) = ctx.saved_tensors
        return sum_rows(grads[0], places), None, None


class _SumRows(torch.autograd.Function):
    """``sum_rows`` with ``copy_rows`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return sum_rows(y, places)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (source,) = ctx.saved_tensors
        return copy_rows(grads[0], source), None, None


def repeat_rows(x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Differentiable ``copy_rows``."""
    result: Tensor = _CopyRows.apply(x, source, places)  # type: ignore[no-untyped-call]
    return result


def add_rows(y: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Differentiable ``sum_rows``."""
    result: Tensor = _SumRows.apply(y, source, places)  # type: ignore[no-untyped-call]
    return result
