"""Copying rows and summing them are adjoint, and every sum has one order."""

from __future__ import annotations

import pytest
import torch

from runtime.experts.rows import add_rows, copy_rows, repeat_rows, sum_rows


def _plan(rows: int, most: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random plan: each row has up to ``most`` copies."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(rows, most, generator=generator) < 0.6
    source = wanted.t().nonzero()[:, 1]
    places = (wanted.t().reshape(-1).cumsum(0) - 1).view(most, rows).t().where(wanted, -1)
    return source, places


@pytest.mark.parametrize(("rows", "most"), [(0, 3), (1, 1), (7, 3), (33, 5)])
def test_summing_is_the_adjoint_of_copying(rows: int, most: int) -> None:
    source, places = _plan(rows, most, seed=rows)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.randn(len(source), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left, right = (copy_rows(x, source) * y).sum(), (x * sum_rows(y, places)).sum()
    torch.testing.assert_close(left, right)


def test_gradients_agree_with_plain_indexing() -> None:
    source, places = _plan(9, 4, seed=3)
    x = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    upstream = torch.randn(len(source), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    (ours,) = torch.autograd.grad(repeat_rows(x, source, places), x, upstream)
    (plain,) = torch.autograd.grad(x[source], x, upstream)
    torch.testing.assert_close(ours, plain)
    y = upstream.clone().requires_grad_()
    back = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    (ours,) = torch.autograd.grad(add_rows(y, source, places), y, back)
    summed = torch.zeros(9, 5, dtype=torch.float64).index_add(0, source, y)
    (plain,) = torch.autograd.grad(summed, y, back)
    torch.testing.assert_close(ours, plain)


def test_a_low_precision_sum_is_rounded_once() -> None:
    """256 + eight times 0.5: adding one after another in bf16 would stay at 256."""
    values = torch.tensor([[256.0], *[[0.5]] * 8], dtype=torch.bfloat16)
    assert sum_rows(values, torch.arange(9).view(1, 9)).item() == 260.0


def test_nothing_is_read_from_a_row_that_is_no_copy() -> None:
    values = torch.tensor([[float("nan")], [2.0]])
    assert sum_rows(values, torch.tensor([[1, -1]])).item() == 2.0
