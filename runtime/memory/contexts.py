"""Several pairs of recomputation contexts as one."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from runtime.memory.recompute import Contexts


class _Both(AbstractContextManager[None]):
    def __init__(self, parts: list[AbstractContextManager[Any]]) -> None:
        self._parts, self._stack = parts, ExitStack()

    def __enter__(self) -> None:
        for part in self._parts:
            self._stack.enter_context(part)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def joined(*makers: Contexts) -> Contexts:
    """A maker whose contexts enter those of all ``makers``, in their order."""

    def make() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = zip(*(maker() for maker in makers), strict=True)
        return _Both(list(first)), _Both(list(again))

    return make
