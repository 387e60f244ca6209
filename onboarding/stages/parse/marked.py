"""Functions that transformers marks as replaceable by a library's kernel, found in the modeling files."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class MarkedFunction:
    """A module-level function that transformers would replace by a library's kernel."""

    module: ModuleType | type
    """The modeling file, or the class of which it is a method."""
    attribute: str
    """Name under which the modeling file's forwards call it."""
    kernel: str
    """Name of the library's function, e.g. ``chunk_kda``."""
    package: str
    function: Callable[..., Any]


_MARK = "use_kernel_func_from_hub_with_fallback.<locals>.decorator.<locals>.wrapped"


def marked_functions(module: ModuleType) -> list[MarkedFunction]:
    """Functions of a modeling file that carry transformers' mark, found by the wrapper's code object, or our own.

    Our own is on the stand-ins for libraries that submitted code imports (``onboarding/custom_code/standins.py``).
    """
    found = []
    for attribute, function in vars(module).items():
        code = getattr(function, "__code__", None)
        if code is not None and isinstance(named := getattr(function, "stands_for", None), tuple):
            kernel, package = named
            found.append(
                MarkedFunction(module=module, attribute=attribute, kernel=kernel, package=package, function=function)
            )
            continue
        if code is None or getattr(code, "co_qualname", "") != _MARK:
            continue
        cells = dict(zip(code.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
        found.append(
            MarkedFunction(
                module=module,
                attribute=attribute,
                kernel=str(cells.get("func_name", attribute)),
                package=str(cells.get("package", "")),
                function=function,
            )
        )
    return found


_ONE_STEP_A_TOKEN = re.compile(r"range\((\w*seq\w*|\w*length|\w+\.shape\[1\]|\w+\.size\(1\))\)")


def own_loops(module: ModuleType, *, forwards: bool = False) -> list[MarkedFunction]:
    """Functions and methods of a modeling file that take one step a token in Python, though nothing marks them.

    A method that uses submodules is left alone, since what it holds must be traced; with ``forwards``, the forwards
    that hold such a loop instead, which only a run can tell from a loop for decoding.
    """
    found = []
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    owners: list[ModuleType | type] = [module, *classes]
    for owner in owners:
        for attribute, function in list(vars(owner).items()):
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            if _steps_by_token(function) and (attribute == "forward") is forwards:
                name = attribute if isinstance(owner, ModuleType) else f"{owner.__name__}.{attribute.lstrip('_')}"
                found.append(
                    MarkedFunction(module=owner, attribute=attribute, kernel=name, package="", function=function)
                )
    return found


@cache
def _steps_by_token(function: Callable[..., Any]) -> bool:
    if getattr(function, "__code__", None) is None or function.__code__.co_qualname == _MARK:
        return False
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return False
    if not _ONE_STEP_A_TOKEN.search(source):
        return False
    return function.__name__ == "forward" or not re.search(r"self\.\w+(\[\w+\])?\(", source)


def modeling_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules in which the model's classes are defined."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules and not name.startswith("torch.")]


LINEAR_ATTENTION_INPUTS = ({"query", "key", "value", "g", "beta"}, {"q", "k", "v", "g", "beta"})


def is_linear_attention(function: Callable[..., Any]) -> bool:
    """Whether a marked function takes q, k, v, a decay and a beta over a whole sequence."""
    names = set(inspect.signature(function).parameters)
    return any(wanted <= names for wanted in LINEAR_ATTENTION_INPUTS)


def linear_attention_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments under the names q, k, v, g, beta and the function's own for the rest."""
    signature = inspect.signature(function)
    given = signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
    short = {"query": "q", "key": "k", "value": "v"}
    return {short.get(name, name): value for name, value in given.arguments.items()}


def is_short_convolution(function: Callable[..., Any]) -> bool:
    """Whether a marked function filters [B, D, T] along the sequence with weights [D, W], and keeps no state."""
    names = list(inspect.signature(function).parameters)
    return names[:1] in (["hidden_states"], ["x"]) and {"weight", "bias", "activation"} <= set(names[1:5])


def short_convolution_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments under the names x, weight, bias and activation, and the rest under ``extras``."""
    signature = inspect.signature(function)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    gathered = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    extras = dict(arguments.pop(gathered, {}))
    given = {"x": arguments.pop(next(iter(signature.parameters)))}
    given |= {name: arguments.pop(name, None) for name in ("weight", "bias", "activation")}
    return {**given, "extras": {**arguments, **extras}}


STATE_SPACE = {"dt", "A", "B", "C", "chunk_size", "dt_bias", "dt_softplus"}


def is_state_space(function: Callable[..., Any]) -> bool:
    """Whether a marked function is Mamba-2's scan over a whole sequence: (x, dt, A, B, C, chunk_size, ...)."""
    names = list(inspect.signature(function).parameters)
    return names[:1] in (["hidden_states"], ["x"]) and set(names) >= STATE_SPACE
