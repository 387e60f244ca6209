"""Python in the way of chosen operators, below autograd, while a context stands in its thread.

A dispatch mode sees every operator of a region, and its cost for each of thousands (tens of microseconds on a slow
core) is more than recomputation takes: measured on an H200, four layers and 8192 tokens, 155 ms a step became 200. Here
a kernel is registered for the chosen operators only, under a dispatch key that every tensor passes below autograd and
that they leave empty; where no context stands it hands the call on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

KEY = "ADInplaceOrView"
"""Below autograd, above every device; functional operators have nothing registered here."""
_AFTER: Any = torch._C._after_ADInplaceOrView_keyset


class Handler(Protocol):
    """What stands in the way."""

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        """Answer one call of an operator.

        Args:
            name: ``aten::mm``.
            run: runs the operator itself.
        """
        ...


class _Standing(threading.local):
    """Recomputation runs in autograd's own threads."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []


_standing = _Standing()
_covered: set[str] = set()
_libraries: list[torch.library.Library] = []
"""Kept for the life of the process: a library that is collected takes its kernels away."""
_lock = threading.Lock()


def enter(handler: Handler) -> None:
    """Let ``handler`` stand in this thread."""
    _standing.handlers.append(handler)


def leave() -> None:
    """Take away the one that entered last."""
    _standing.handlers.pop()


def cover(names: Iterable[str]) -> None:
    """Put the kernel in the way of operators' default overloads, once a process; unknown names are passed over."""
    with _lock:
        for name in names:
            namespace, _, short = name.partition("::")
            packet = getattr(getattr(torch.ops, namespace), short, None)
            if name in _covered or packet is None or "default" not in packet.overloads():
                continue
            operator = packet.default
            taken = torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY)
            if operator._schema.is_mutable or taken:
                continue
            library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            library.impl(short, _kernel(name, operator), KEY, with_keyset=True)  # type: ignore[no-untyped-call]
            _libraries.append(library)
            _covered.add(name)


def operators_of(namespaces: Iterable[str]) -> list[str]:
    """Names of all operators that are registered in some namespaces now."""
    wanted = tuple(f"{namespace}::" for namespace in namespaces)
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.partition(".")[0] for name in names if name.startswith(wanted)})


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keyset & _AFTER
        if not _standing.handlers:
            return operator.redispatch(keys, *args, **kwargs)
        return _standing.handlers[-1].call(name, lambda: operator.redispatch(keys, *args, **kwargs))

    return kernel
