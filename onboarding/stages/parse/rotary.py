"""Functions that turn queries and keys by cos and sin, as modeling files define them; the trace notes their calls."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class RotaryCall:
    """One call of such a function."""

    path: str
    """Name of the module whose forward called it."""
    attribute: str
    """Name of the function in that module's Python module."""
    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    """Of ``q``, ``k`` (unless there is none), ``cos``."""
    dtype: str
    options: dict[str, Any]
    """The other arguments."""

    @property
    def place(self) -> str:
        """Name under which the trace files the function's own operators."""
        return f"{self.path}.{self.attribute}"


class Sink(Protocol):
    """What the tracer offers."""

    rotary: list[RotaryCall]

    @property
    def path(self) -> str:
        """Name of the module whose forward runs."""

    def under(self, path: str) -> AbstractContextManager[None]:
        """Attribute what runs inside to a path of its own."""


def rotary_functions(module: ModuleType) -> Iterator[str]:
    """Names of a modeling file's functions of q (or x), perhaps k, cos and sin."""
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and "rotary" in name:
            parameters = list(inspect.signature(value).parameters)
            if parameters[:4] == ["q", "k", "cos", "sin"] or parameters[1:3] == ["cos", "sin"]:
                yield name


def observed(sink: Sink, module: ModuleType, attribute: str) -> Callable[..., Any]:
    """The function itself, with its calls noted and its operators filed under its own name."""
    function = getattr(module, attribute)
    signature = inspect.signature(function)

    def rotary(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        names = list(signature.parameters)
        tensors = {"q": given.pop(names[0]), "k": given.pop("k", None), "cos": given.pop("cos")}
        given.pop("sin")
        found = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        inside = any(known.place == sink.path for known in sink.rotary)  # a part of another such function
        if inside or "q" not in found or "cos" not in found:
            return function(*args, **kwargs)
        call = RotaryCall(
            path=sink.path,
            attribute=attribute,
            function=function,
            shapes={n: tuple(t.shape) for n, t in found.items()},
            dtype=str(found["q"].dtype),
            options={n: v for n, v in given.items() if v is not None},
        )
        sink.rotary.append(call)
        with sink.under(call.place):
            return function(*args, **kwargs)

    return rotary
