"""Run code that says float32 in float64.

Reference implementations cast to float32 inside ("norm in fp32"), so a model in float64 would still compute much of
itself in float32. Under this mode a request for float32 gives float64, and the run is a float64 reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Widen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return Tensor.double(*args)
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def widened() -> Iterator[None]:
    """float32 means float64 inside, for conversions, reductions and new tensors alike."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)
