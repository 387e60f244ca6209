"""Read frozen dataclasses from plain data (YAML, JSON) and write them back, with refusals that name the field."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from runtime.refusal import Refused

T = TypeVar("T")


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """Build a config dataclass from nested mappings.

    Args:
        cls: a frozen, keyword-only dataclass whose fields are plain values, tuples of such, or other dataclasses.
        data: what a YAML file holds.
        where: dotted path of ``data`` in the whole file, for messages.

    Raises:
        Refused: ``config-field`` for an unknown field or a value of another type, and what ``__post_init__`` refuses.
    """
    if not isinstance(data, Mapping):
        raise Refused("config-field", f"{where or 'the config'} is no mapping", f"it holds {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}"
            raise Refused("config-field", f"unknown field {_path(where, str(name))}", advice)
    missing = [
        n
        for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise Refused("config-field", f"{_path(where, missing[0])} is missing", f"add it to {where or 'the config'}")
    values = {name: _value(hints[name], value, _path(where, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise Refused("config-value", f"{where or 'the config'} is not usable", str(error)) from None


def to_plain(value: Any) -> Any:
    """Nested dataclasses and tuples as mappings and lists; :func:`from_plain` reads them back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the hinted type: lists become tuples, whole numbers become floats where floats are wanted."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if value not in get_args(hint):
            raise Refused("config-value", f"{where} is {value!r}", f"one of {', '.join(map(repr, get_args(hint)))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise Refused("config-value", f"{where} is {value!r}", "a list is wanted")
        item = get_args(hint)[0]
        return tuple(_value(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping):
        return dict(value)
    return _scalar(hint, value, where)


def _union(hint: Any, value: Any, where: str) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    failures = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _value(option, value, where)
        except Refused as refusal:
            failures.append(refusal)
    raise failures[0]


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise Refused("config-value", f"{where} is {value!r}", f"{getattr(hint, '__name__', hint)} is wanted")
    return value
