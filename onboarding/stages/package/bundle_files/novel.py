"""The hook of operators that no family covers: a function that a module's file calls, or the module's forward.

What stands for the call was proven for certain arguments: tensors by name, and other arguments of certain values. A
call with anything else runs the model's own code.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

OWN = "self."
CONSTANT = "constant "
_VALUE = re.compile(r"(?:([-+]?[0-9.]+(?:e[-+]?\d+)?)(?: \* )?)?(?:([A-Za-z]\w*)(?: \*\* ([-+]?[0-9.]+))?)?\Z")
_SIZE = re.compile(r"(?:(\d+)\*)?([A-Za-z]\w*)\Z")
PLAIN = {"True": True, "False": False, "None": None}


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Let ``swap``'s kernel stand for the module's core; returns the undo function."""
    if swap.function:
        hooks.CALLS.setdefault(
            "novel", lambda s, signature, args, kwargs: _call(hooks, s, None, signature, args, kwargs)
        )
        undo: Callable[[], None] = hooks._install_function(module, swap)
        return undo
    signature = inspect.signature(type(module).forward)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])

    def forward(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return _call(hooks, swap, self, signature, args, kwargs)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)

    undo = hooks._replace_forward(module, forward)
    return undo


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel cannot stand in this module, or None: tensors of its own that the claim names must be there."""
    for place in names.values():
        path = place.removeprefix(OWN)
        if place.startswith(OWN) and not isinstance(_attribute(module, path), Tensor):
            return f"no tensor {path}"
    return None


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _call(
    hooks: Any,
    swap: Any,
    module: nn.Module | None,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    given, gathered = hooks._given(signature, args, kwargs)
    given |= gathered
    claims = {n: a for n, a in swap.attributes.items() if not n.startswith(CONSTANT) and n not in ("returns", "form")}
    constants = {n.removeprefix(CONSTANT): value for n, value in swap.attributes.items() if n.startswith(CONSTANT)}
    tensors = {
        n: _attribute(module, a.removeprefix(OWN)) if a.startswith(OWN) else given.get(a) for n, a in claims.items()
    }
    missing = [n for n, t in tensors.items() if not isinstance(t, Tensor)]
    if missing:
        raise hooks.Uncovered(f"no tensor {', '.join(missing)}")
    unknown = set(given) - set(constants) - set(claims.values())
    if unknown:
        raise hooks.Uncovered(f"argument {', '.join(sorted(unknown))}")
    _check(hooks, swap.spec, tensors, given, constants)
    results = list(swap.call(**tensors))
    if swap.attributes["form"] == "tensor":
        return results[0]
    return tuple(None if name == "None" else results.pop(0) for name in swap.attributes["returns"].split())


def _check(
    hooks: Any, spec: dict[str, Any], tensors: dict[str, Tensor], given: dict[str, Any], constants: dict[str, str]
) -> None:
    """Shapes must bind to dims, dtypes and constants be those that were proven."""
    signature = json.loads(spec["signature"])
    entries = {entry["name"]: entry for entry in signature["inputs"]}
    hooks._covered(*(t for n, t in tensors.items() if entries[n]["dtype"] == "activation"))
    dims: dict[str, int] = {}
    for name, tensor in tensors.items():
        dtype = entries[name]["dtype"]
        if dtype != "activation" and str(tensor.dtype) != f"torch.{dtype}":
            raise hooks.Uncovered(f"{name} is {tensor.dtype}")
        shape = entries[name]["shape"]
        if tensor.ndim != len(shape):
            raise hooks.Uncovered(f"{name} has shape {list(tensor.shape)}")
        for size, actual in zip(shape, tensor.shape, strict=True):
            found = _SIZE.match(str(size))
            if found is None:
                fits = int(size) == actual
            else:
                factor = int(found[1] or 1)
                fits = actual % factor == 0 and dims.setdefault(found[2], actual // factor) == actual // factor
            if not fits:
                raise hooks.Uncovered(f"{name} has a size {actual} where the kernel has {size}")
    for name, stated in constants.items():
        if name in given and not _same(given[name], stated, dims):
            raise hooks.Uncovered(f"{name} is {given[name]!r} where the kernel has {stated}")


def _same(actual: Any, stated: str, dims: dict[str, int]) -> bool:
    if stated in PLAIN:
        return actual is PLAIN[stated]
    found = _VALUE.match(stated)
    if found is None or isinstance(actual, bool) or not isinstance(actual, int | float):
        return False
    value = float(found[1]) if found[1] else 1.0
    if found[2]:
        value *= float(dims[found[2]]) ** float(found[3] or 1.0)
    return abs(value - actual) <= 1e-6 * max(abs(actual), 1e-30)
