"""The shared expert of a block, run while the routed experts' tokens are on their way.

Blocks call their shared expert after the routed ones, on the block's own input. It is run early on that input, between
sending the tokens and waiting for them, and its result is handed out when the block asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn


class SharedExperts:
    """One block's shared expert."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._original: Callable[[Tensor], Tensor] = module.forward
        self._input: Tensor | None = None
        self._early: Tensor | None = None

    @classmethod
    def find(cls, block: nn.Module) -> SharedExperts | None:
        """The block's only child with "shared" in its name that is no gate; None if there is none or are several."""
        found = [m for n, m in block.named_children() if "shared" in n and "gate" not in n]
        return cls(found[0]) if len(found) == 1 else None

    def install(self) -> None:
        """Hand out the early result where the module is called on the block's input."""
        shared = self

        def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            early = shared._take(x) if not args and not kwargs else None
            return shared._original(x, *args, **kwargs) if early is None else early

        self.module.forward = MethodType(forward, self.module)

    def expect(self, *args: Any, **kwargs: Any) -> None:
        """Note the block's input."""
        first = args[0] if args else kwargs.get("hidden_states")
        self._input = first if isinstance(first, Tensor) else None
        self._early = None

    def run_early(self) -> None:
        """Run on the block's input now."""
        if self._input is not None:
            self._early = self._original(self._input)

    def _take(self, x: Tensor) -> Tensor | None:
        given, early = self._input, self._early
        self._input = self._early = None
        if given is None or early is None:
            return None
        if x is not given and not _same_memory(x, given):
            return None
        return early.view(*x.shape[:-1], early.shape[-1])


def _same_memory(x: Tensor, given: Tensor) -> bool:
    """Whether x is a reshape of ``given`` over the same last dimension."""
    base = [t._base if t._is_view() else t for t in (x, given)]
    return (
        base[0] is base[1]
        and x.storage_offset() == given.storage_offset()
        and x.numel() == given.numel()
        and x.shape[-1] == given.shape[-1]
        and x.is_contiguous()
        and given.is_contiguous()
    )
