"""Bounds of an interpreted kernel's memory: what ``compute-sanitizer memcheck`` is to a compiled one.

Every address that a launch reads or writes must lie in the storage of one of its tensor arguments. Without this, a
write past the end of a candidate's own allocation would go unseen: only what the judge allocates is surrounded by
poison. A range that no compiler takes is refused, too. It runs in the candidate's process and finds
mistakes there; results judge whoever evades it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as stock

Extents = list[tuple[int, int, str]]
"""First address, address past the end, and the tensor in words; sorted."""

_running: Extents | None = None


class OutOfBoundsError(RuntimeError):
    """A kernel reads or writes memory that was not given to it."""


def check(addresses: Any, mask: Any, itemsize: int, what: str) -> None:
    """Check one access of a running launch.

    Raises:
        OutOfBoundsError: an address lies outside of all tensors of the launch.
    """
    if _running is None:
        return
    wanted = addresses[np.broadcast_to(mask != 0, addresses.shape)]  # masks may be integers
    if wanted.size == 0:
        return
    starts = [first for first, _, _ in _running]
    low, high = int(wanted.min()), int(wanted.max())
    at = bisect.bisect_right(starts, low) - 1
    if at >= 0 and high + itemsize <= _running[at][1]:
        return
    # one access may touch several tensors; every address must lie in some
    at_each = np.searchsorted(np.asarray(starts, np.uint64), wanted.astype(np.uint64), side="right").astype(int) - 1
    ends = np.asarray([end for _, end, _ in _running], np.uint64)
    outside = (at_each < 0) | (wanted.astype(np.uint64) + np.uint64(itemsize) > ends[at_each])
    if outside.any():
        address = int(wanted[outside][0])
        near = _running[max(int(at_each[outside][0]), 0)]
        raise OutOfBoundsError(f"it {what} {address - near[1]} bytes past the end of {near[2]}")


def _each(arguments: Iterable[Any]) -> Iterator[Any]:
    """Arguments, those in tuples as well."""
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from _each(argument)
        else:
            yield argument


def extents(arguments: list[Any]) -> Extents:
    """Storages of the tensors among a launch's arguments."""
    found: dict[int, tuple[int, int, str]] = {}
    for argument in _each(arguments):
        tensor = getattr(argument, "base", argument)
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
            storage = tensor.untyped_storage()
            words = f"a tensor of shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"
            found[storage.data_ptr()] = (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), words)
    return sorted(found.values())


def watch() -> None:
    """Check every launch of an interpreted kernel from now on. Once a process, after ``interpreter.activate``."""
    builder, executor = stock.InterpreterBuilder, stock.GridExecutor
    launch, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    exchange, update = builder.create_atomic_cas, builder.create_atomic_rmw
    make_range = builder.create_make_range

    def size(pointer: Any) -> int:
        return int(np.dtype(stock._get_np_dtype(pointer.get_element_ty())).itemsize)

    @functools.wraps(launch)
    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _running
        before, _running = _running, extents([*args, *kwargs.values()])
        try:
            return launch(self, *args, **kwargs)
        finally:
            _running = before

    @functools.wraps(load)
    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs.data, mask.data, size(ptrs), "reads")
        return load(self, ptrs, mask, *rest)

    @functools.wraps(store)
    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs.data, mask.data, size(ptrs), "writes")
        return store(self, ptrs, value, mask, *rest)

    @functools.wraps(update)
    def checked_update(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        check(ptr.data, mask.data, size(ptr), "updates")
        return update(self, op, ptr, val, mask, *rest)

    @functools.wraps(exchange)
    def checked_exchange(self: Any, ptr: Any, *rest: Any) -> Any:
        check(ptr.data, np.ones((), bool), size(ptr), "updates")
        return exchange(self, ptr, *rest)

    @functools.wraps(make_range)
    def checked_range(self: Any, kind: Any, start: Any, stop: Any) -> Any:
        size = stop - start
        if size <= 0 or size & (size - 1):
            raise ValueError(f"tl.arange({start}, {stop}): a compiler takes powers of two only")
        return make_range(self, kind, start, stop)

    executor.__call__ = checked_launch
    builder.create_make_range = checked_range
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_update, checked_exchange
