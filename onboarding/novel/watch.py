"""Watches a model run: with what, how often and at what cost its novel modules call what a kernel might take over."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboarding.novel.facts import OWN

Signature = inspect.Signature


@dataclass
class Seen:
    """The calls of one core."""

    cls: type
    function: str
    original: Callable[..., Any]
    signature: Signature
    calls: int = 0
    first: list[tuple[nn.Module, dict[str, Any], Any]] = field(default_factory=list)
    """Module, arguments by parameter, result: of the first call of each instance, a few of them."""
    operators: int = 0
    moved: int = 0


class _Cost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and bytes for whoever is active."""

    def __init__(self, active: list[Seen]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = active

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = torch.utils._pytree.tree_leaves((args, kwargs, result))
        moved = sum(t.numel() * t.element_size() for t in views if isinstance(t, Tensor))
        for seen in self.active:
            seen.operators += 1
            seen.moved += 0 if func.is_view else moved
        return result


INSTANCES = 2
"""Of a class whose first calls are kept."""


def watch(model: nn.Module, names: list[str], run: Callable[[], Any]) -> list[Seen]:
    """Run the model once and tell what its modules of these classes call.

    Args:
        names: qualified names of classes.
        run: one forward of the model.
    """
    classes = {type(m): None for m in model.modules() if type(m).__qualname__ in names}
    every: list[Seen] = []
    active: list[Seen] = []
    inside: list[nn.Module] = []
    undo: list[Callable[[], None]] = []
    for cls in classes:
        own = Seen(cls=cls, function="", original=cls.forward, signature=_of_forward(cls))
        every.append(own)
        for name, function in functions_of(cls).items():
            seen = Seen(cls=cls, function=name, original=function, signature=inspect.signature(function))
            every.append(seen)
            undo.append(_replace(cls, name, seen, inside, active))
        for module in model.modules():
            if type(module) is cls:
                undo.append(_follow(module, own, inside, active))
    try:
        with _Cost(active):
            run()
    finally:
        for step in reversed(undo):
            step()
    return [seen for seen in every if seen.calls]


def functions_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Functions of the definition's own package that the methods of a class call by a name of their file."""
    place = sys.modules[cls.__module__]
    names: set[str] = set()
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            names |= _names(method.__code__)
    package = cls.__module__.partition(".")[0]
    return {
        name: found
        for name in sorted(names)
        if isinstance(found := getattr(place, name, None), FunctionType)
        and found.__module__.partition(".")[0] == package
    }


def _names(code: CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


def _of_forward(cls: Any) -> Signature:
    whole = inspect.signature(cls.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _replace(cls: type, name: str, seen: Seen, inside: list[nn.Module], active: list[Seen]) -> Callable[[], None]:
    place, original = sys.modules[cls.__module__], seen.original

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not inside or type(inside[-1]) is not seen.cls:
            return original(*args, **kwargs)
        with _counted(seen, active):
            result = original(*args, **kwargs)
        _note(seen, inside[-1], args, kwargs, result)
        return result

    setattr(place, name, watched)
    return lambda: setattr(place, name, original)


def _follow(module: nn.Module, seen: Seen, inside: list[nn.Module], active: list[Seen]) -> Callable[[], None]:
    own = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        inside.append(module)
        try:
            with _counted(seen, active):
                result = own(*args, **kwargs)
        finally:
            inside.pop()
        _note(seen, module, args, kwargs, result)
        return result

    module.forward = watched
    return lambda: module.__dict__.pop("forward", None) and None


@contextmanager
def _counted(seen: Seen, active: list[Seen]) -> Iterator[None]:
    active.append(seen)
    try:
        yield
    finally:
        active.remove(seen)


def _note(seen: Seen, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    seen.calls += 1
    if len(seen.first) < INSTANCES and all(known is not module for known, _, _ in seen.first):
        bound = seen.signature.bind(*args, **kwargs)
        gathered = [p.name for p in seen.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        given = dict(bound.arguments)
        for name in gathered:
            given |= given.pop(name, {})
        seen.first.append((module, given, result))


def tensors_of(seen: Seen, module: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that a call depends on, by argument; of a forward its parameters and buffers besides."""
    found = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if not seen.function:
        found |= {f"{OWN}{n}": p for n, p in [*module.named_parameters(), *module.named_buffers()]}
    return found


def outputs_of(result: Any) -> list[Tensor | None]:
    """What a call returns, in order; None for what is no tensor.

    Raises:
        ValueError: it returns something else than tensors and Nones.
    """
    values = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else [result]
    if not all(value is None or isinstance(value, Tensor) for value in values):
        raise ValueError("it returns something else than tensors")
    return values
