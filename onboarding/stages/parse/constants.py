"""Small constants keep their values under FakeTensorMode.

Model code reads values of tensors that depend on no weight and no data: rates of a ``linspace``, sizes of an image
grid, sequence boundaries made from them. Fake tensors carry such values only for single numbers; here the limit is
raised and what factories of small index tensors make is such a constant too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 1 << 16
"""Elements of a constant: 512 KiB of int64."""
aten = torch.ops.aten
_FACTORIES = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.scalar_tensor.default,
)
_INTEGERS = (torch.int64, torch.int32)
_OF_INDICES = (aten.zeros.default, aten.ones.default, aten.full.default)
"""Factories that also make weights: a constant only where they make integers."""


class _Constants(TorchDispatchMode):
    """Computes small factories for real."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FACTORIES:
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if made.numel() > LIMIT or (func in _OF_INDICES and made.dtype not in _INTEGERS) or made.device.type != "cpu":
            return made
        with unset_fake_temporarily():
            real = func(*args, **kwargs)
        return self.mode.fake_tensor_converter.from_real_tensor(self.mode, real, make_constant=True)


@contextmanager
def small_constants(mode: FakeTensorMode) -> Iterator[None]:
    """Inside the fake mode: let small constants propagate."""
    with patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", LIMIT), _Constants(mode):
        yield


def real_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a constant under the fake mode; None for any other tensor."""
    value: torch.Tensor | None = getattr(tensor, "constant", None)
    return value


def count_true(values: torch.Tensor) -> int:
    """How many entries of a real tensor are not zero, also inside a fake mode."""
    with unset_fake_temporarily(), torch.utils._python_dispatch._disable_current_modes():
        return int(torch.count_nonzero(values))
