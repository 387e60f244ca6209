"""Launches of kernels that were launched before, without Triton's bookkeeping.

For every launch Triton binds the arguments, reads its settings from the environment, computes a cache key and asks the
driver about every pointer: several times the launch itself, and more than a small kernel takes. The answer depends on
little: dtypes and alignment of the pointers, the numbers, the flags, the device. :class:`Launcher` remembers the
compiled kernel by these facts and hands it addresses; whatever it has not seen, or does not know how to treat (another
Triton, hooks of a profiler), goes through Triton.

Self-contained (torch and triton only): bundles carry a copy of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled kernels are called as below; others keep Triton's own launches."""
REMEMBERED = 1024
"""Launches kept by kernel; when sizes change at every call, the oldest are forgotten all at once."""

_NUMBERS = frozenset((int, bool, float, str, type(None)))
"""What stands in a key by its value."""
_TENSORS = (Tensor, torch.nn.Parameter)
_NOTHING = (None, None, None)
"""Metadata and hooks of a launch: nobody listens."""


class _Known(NamedTuple):
    """A compiled kernel and how it is launched."""

    compiled: Any
    launch: Callable[..., Any]
    """Called with the grid, the stream, ``before``, the arguments and ``after``."""
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    """The values of the arguments that were given by name."""


class Launcher:
    """Takes the place of ``kernel.run``."""

    def __init__(self, kernel: Any) -> None:
        self.stock = kernel.run
        self.names: list[str] = list(kernel.arg_names)
        self.listeners: list[Any] = kernel.pre_run_hooks
        self.runtime = triton.knobs.runtime
        self.seen: dict[Any, _Known] = {}

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """As Triton's ``run``; ``grid`` is a tuple of numbers or a function."""
        runtime = self.runtime
        if (
            warmup
            or self.listeners
            or _listens(runtime.launch_enter_hook)
            or _listens(runtime.launch_exit_hook)
            or grid.__class__ is not tuple
        ):
            return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        device = torch._C._cuda_getDevice()
        facts: list[Any] = [device]
        given: list[Any] = []
        for value in args:
            kind = value.__class__
            if kind in _NUMBERS:
                given.append(value)
                facts.append(kind)
                facts.append(value)
            elif kind in _TENSORS and value.get_device() == device:
                address = value.data_ptr()
                given.append(address)
                facts.append(value.dtype)
                facts.append(address % 16 == 0)
            else:  # a tuple of tensors, a descriptor, another device's tensor: no facts to remember it by
                return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        kinds = tuple(map(type, kwargs.values()))
        if not _NUMBERS.issuperset(kinds):
            return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        key = (*facts, *kwargs, *kwargs.values(), *kinds)
        known = self.seen.get(key)
        if known is None:
            return self._first(key, args, grid, kwargs)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        known.launch(x, y, z, stream, *known.before, *given, *known.after)
        return known.compiled

    def _first(self, key: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        """Launch through Triton, and remember what it compiled if every argument was given."""
        compiled = self.stock(*args, grid=grid, warmup=False, **kwargs)
        order = self.names[len(args) :]
        if compiled is not None and all(name in kwargs for name in order):
            if len(self.seen) >= REMEMBERED:
                self.seen.clear()
            self.seen[key] = _known(compiled, tuple(kwargs[name] for name in order))
        return compiled


def _known(compiled: Any, after: tuple[Any, ...]) -> _Known:
    """How to launch a compiled kernel: by its C function alone where it needs no scratch memory."""
    run = compiled.run
    scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
    if scratch or not hasattr(run, "launch"):
        return _Known(compiled, run, (compiled.function, compiled.packed_metadata, *_NOTHING), after)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    before = (compiled.function, *flags, None, None, compiled.packed_metadata, *_NOTHING)
    return _Known(compiled, run.launch, before, after)


def _listens(hook: Any) -> bool:
    """Whether a chain of hooks has any; what is no chain listens."""
    return hook is not None and bool(getattr(hook, "calls", True))


def quicken(module: Any) -> None:
    """Give every kernel of a module a :class:`Launcher`, once; kernels of the interpreter stay as they are."""
    if not triton.__version__.startswith(KNOWN_TRITON):
        return
    from triton.runtime.jit import JITFunction

    for value in list(vars(module).values()):
        if isinstance(value, JITFunction) and not isinstance(value.run, Launcher):
            value.run = Launcher(value)
