"""Functions that transformers marks as replaceable by a library's kernel, found in the modeling files."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class MarkedFunction:
    """A module-level function that transformers would replace by a library's kernel."""

    module: ModuleType
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
