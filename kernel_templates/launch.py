"""Launches of kernels that were launched before, without Triton's bookkeeping.

For every launch Triton binds the arguments, reads its settings from the environment and computes a cache key: several
times the launch itself, and more than a small kernel takes. The answer depends on little: dtypes and alignment of the
pointers, the numbers, the flags, the device. :class:`Launcher` remembers the compiled kernel by these facts and calls
it; whatever it has not seen, or does not know how to treat (another Triton, hooks of a profiler), goes through Triton.

Self-contained (torch and triton only): bundles carry a copy of this file.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

KNOWN_TRITON = ("3.6.",)
"""Versions whose compiled kernels are called as below; others keep Triton's own launches."""
REMEMBERED = 1024
"""Launches kept by kernel; when sizes change at every call, the oldest are forgotten all at once."""

_NUMBERS = frozenset((int, bool, float, str, type(None)))
"""What stands in a key by its value."""
_NOTHING = (None, None, None)
"""Metadata and hooks of a launch: nobody listens."""


class Launcher:
    """Takes the place of ``kernel.run``."""

    def __init__(self, kernel: Any) -> None:
        self.stock = kernel.run
        self.names: list[str] = list(kernel.arg_names)
        self.listeners: list[Any] = kernel.pre_run_hooks
        self.seen: dict[Any, Any] = {}

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """As Triton's ``run``; ``grid`` is a tuple of numbers or a function."""
        runtime = triton.knobs.runtime
        if (
            warmup
            or self.listeners
            or _listens(runtime.launch_enter_hook)
            or _listens(runtime.launch_exit_hook)
            or callable(grid)
        ):
            return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        device = torch.cuda.current_device()
        facts: list[Any] = [device]
        for value in args:
            if isinstance(value, Tensor):
                if value.device.index != device:
                    return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
                facts += (value.dtype, value.data_ptr() % 16 == 0)
            elif value.__class__ in _NUMBERS:
                facts += (value.__class__, value)
            else:  # a tuple of tensors, a descriptor: no facts to remember it by
                return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        if not _NUMBERS.issuperset(map(type, kwargs.values())):
            return self.stock(*args, grid=grid, warmup=warmup, **kwargs)
        key = (*facts, *kwargs, *kwargs.values())
        kernel = self.seen.get(key)
        if kernel is None:
            return self._first(key, args, grid, kwargs)
        compiled, order = kernel
        compiled.run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            *_NOTHING,
            *args,
            *[kwargs[name] for name in order],
        )
        return compiled

    def _first(self, key: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        """Launch through Triton, and remember what it compiled if every argument was given."""
        compiled = self.stock(*args, grid=grid, warmup=False, **kwargs)
        order = self.names[len(args) :]
        if compiled is not None and all(name in kwargs for name in order):
            if len(self.seen) >= REMEMBERED:
                self.seen.clear()
            self.seen[key] = (compiled, order)
        return compiled


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
