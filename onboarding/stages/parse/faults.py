"""Which field of a configuration an exception is about, read off the failing expression."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import FrameType, TracebackType
from typing import Any

from torch import nn

MISSING = object()
_QUOTED = re.compile(r"[Ff]ield '(\w+)'|object has no attribute '(\w+)'|argument '(\w+)'|`(\w+)`")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A field that the failing expression reads."""

    config: Any
    name: str
    value: Any
    """What it holds; ``MISSING`` where the configuration has no such field."""
    where: str
    """File and line of the expression."""
    depth: int = 0
    """Calls of model code between the expression and the failure."""

    @property
    def unset(self) -> bool:
        """The field is missing or None: the usual reason for a failure."""
        return self.value is None or self.value is MISSING


def is_config(value: Any) -> bool:
    """Whether an object is a configuration of transformers (or of a definition's own code)."""
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


@cache
def _tree(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return None


def faults_of(error: BaseException) -> list[Fault]:
    """Fields read by the failing expression, innermost model code first, unset ones before set ones."""
    found: list[Fault] = []
    for depth, (frame, node) in enumerate(_expressions(error.__traceback__)):
        where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{node.lineno}"
        found += [Fault(config=c, name=n, value=v, where=where, depth=depth) for c, n, v in _reads(node, frame)]
    unique = {(id(fault.config), fault.name): fault for fault in reversed(found)}
    ordered = list(unique.values())[::-1]
    return [f for f in ordered if f.unset] + [f for f in ordered if not f.unset]


def each_config(root: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """A configuration and all nested ones, with their paths."""
    yield root, path
    for name, value in vars(root).items():
        if is_config(value) and not name.startswith("_"):
            yield from each_config(value, (*path, name))


def path_to(root: Any, wanted: Any) -> tuple[str, ...] | None:
    """Names of the nested configurations that lead from the root to one of them."""
    if root is wanted:
        return ()
    for name, value in vars(root).items() if root is not None else ():
        if is_config(value) and (inner := path_to(value, wanted)) is not None:
            return (name, *inner)
    # a nested configuration that failed while it was built hangs nowhere yet: its class says where it belongs
    parts = getattr(root, "sub_configs", None) or {}
    return next(((name,) for name, cls in parts.items() if cls is type(wanted)), None)


def names_in(error: BaseException) -> list[str]:
    """Names that the message itself quotes, in its order."""
    found = (next(filter(None, groups), "") for groups in _QUOTED.findall(str(error)))
    return list(dict.fromkeys(filter(None, found)))


def choices_of(error: BaseException) -> list[str]:
    """The keys of the table that the failing expression looked a missing key up in."""
    for frame, node in _expressions(error.__traceback__):
        for part in ast.walk(node):
            if not isinstance(part, ast.Subscript) or not isinstance(part.value, ast.Name):
                continue
            table = frame.f_locals.get(part.value.id, frame.f_globals.get(part.value.id))
            if isinstance(table, Mapping):
                return [str(key) for key in table]
    return []


def _expressions(trace: TracebackType | None) -> Iterator[tuple[FrameType, ast.expr | ast.stmt]]:
    """The failing expression of every frame of model code, innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for item in reversed(frames):
        filename = item.tb_frame.f_code.co_filename.rpartition("/")[2]
        if not filename.startswith(("modeling_", "configuration_")):
            continue
        node = _node_at(item)
        if node is not None:
            yield item.tb_frame, node


def _positions(item: TracebackType) -> tuple[int | None, int | None, int | None, int | None]:
    every = list(item.tb_frame.f_code.co_positions())
    return every[item.tb_lasti // 2]


def _node_at(item: TracebackType) -> ast.expr | ast.stmt | None:
    """The smallest syntax node that covers the failing instruction; a whole statement where it reads no attribute."""
    tree = _tree(item.tb_frame.f_code.co_filename)
    line, end_line, column, end_column = _positions(item)
    if tree is None or line is None or end_line is None or column is None or end_column is None:
        return None
    covering = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.stmt)
        and (node.lineno, node.col_offset) <= (line, column)
        and (node.end_lineno or 0, node.end_col_offset or 0) >= (end_line, end_column)
        and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.If | ast.With | ast.While)
    ]
    covering.sort(key=lambda node: ((node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset))
    if any(isinstance(node, ast.Raise) for node in covering):  # the condition says what was wrong
        tests = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and node.lineno <= line and (node.end_lineno or 0) >= line
        ]
        innermost = min(tests, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
        covering = [innermost.test, *covering] if innermost is not None else covering
    reading = [node for node in covering if any(isinstance(n, ast.Attribute | ast.Name) for n in ast.walk(node))]
    return next(iter(reading), None)


def _reads(node: ast.AST, frame: FrameType) -> Iterator[tuple[Any, str, Any]]:
    """(configuration, field, value) of what an expression reads, through local names and attributes of modules."""
    for part in ast.walk(node):
        if (read := _field(part, frame)) is not None:
            yield read
        elif isinstance(part, ast.Attribute):
            owner = _value(part.value, frame)
            if isinstance(owner, nn.Module) and _get(owner, part.attr) in (None, MISSING):
                yield from _assigned(f"self.{part.attr}", frame)
        elif (
            isinstance(part, ast.Name)
            and part.id in frame.f_locals
            and not is_config(frame.f_locals[part.id])
            and not isinstance(frame.f_locals[part.id], nn.Module)
        ):
            yield from _assigned(part.id, frame)


def _assigned(target: str, frame: FrameType) -> Iterator[tuple[Any, str, Any]]:
    """Fields that the assignment of a name in the same function (for ``self.x``: in the class) reads."""
    tree = _tree(frame.f_code.co_filename)
    if tree is None:
        return
    name = frame.f_code.co_qualname
    wanted = name.rpartition(".")[0].split(".")[0] if target.startswith("self.") else frame.f_code.co_name
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.ClassDef) or scope.name != wanted:
            continue
        if isinstance(scope, ast.FunctionDef) and not scope.lineno <= frame.f_lineno <= (scope.end_lineno or 0):
            continue
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and any(ast.unparse(t) == target for t in statement.targets):
                yield from filter(None, (_field(part, frame) for part in ast.walk(statement.value)))


def _field(node: ast.AST, frame: FrameType) -> tuple[Any, str, Any] | None:
    """(configuration, field, value) of ``config.x`` or ``getattr(config, "x", default)``."""
    if isinstance(node, ast.Attribute):
        owner, name = _value(node.value, frame), node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
        owner, name = _value(node.args[0], frame), str(node.args[1].value)
    else:
        return None
    return (owner, _own_name(owner, name), _get(owner, name)) if is_config(owner) else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a chain of names and attributes in a frame; ``MISSING`` for anything else."""
    if isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id, MISSING)
        return _outer_config(node.id, frame) if found is MISSING and node.id.endswith("config") else found
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return MISSING if owner is MISSING else _get(owner, node.attr)
    return MISSING


def _outer_config(name: str, frame: FrameType | None) -> Any:
    """The configuration that a constructor had under a name: of the module, or of a module that called it."""
    for _ in range(40):
        if frame is None:
            break
        config = getattr(frame.f_locals.get("self"), "config", None)
        if is_config(config):
            return getattr(config, name, config)
        frame = frame.f_back
    return MISSING


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, MISSING)
    except Exception:  # a property that fails
        return MISSING


def _own_name(config: Any, name: str) -> str:
    return str((getattr(config, "attribute_map", None) or {}).get(name, name))
