"""Comparing storages bit by bit, whatever strides their dimensions of one element carry."""

from __future__ import annotations

import pytest
import torch

from onboarding.stages.judge.images import same_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((1, 1), (14, 14)), ((5, 1), (1, 14)), ((1,), (14,)), ((3, 4), (1, 3)), ((0, 3), (3, 1)), ((), ())],
)
def test_any_strides(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = torch.randn(200).to(dtype).as_strided(shape, stride)
    assert same_bytes(tensor, tensor.contiguous())
    if tensor.numel():
        assert not same_bytes(tensor, tensor + 1)


def test_nan_equals_itself_and_zeros_differ_by_sign() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_other_shape_or_dtype_is_not_the_same() -> None:
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
