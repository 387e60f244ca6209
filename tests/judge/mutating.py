"""Automatic mutants of a candidate: one small change each, of the kinds that programmers and models make."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass

CONTRACT = {"FAMILY", "SPEC", "INPUTS", "OUTPUTS", "TRAITS", "CONFIGS"}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NARROWER = {"float32": "bfloat16"}
"""Not int64 to int32: that shows from 2^31 elements, which take a GPU."""
OTHERS = {"exp": "exp2", "exp2": "exp", "maximum": "minimum", "minimum": "maximum", "sigmoid": "exp", "rsqrt": "sqrt"}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed candidate."""

    source: bytes
    words: str
    """``a + b -> a - b in `c = a + b```."""


def mutants(source: str, count: int, seed: int) -> list[Mutant]:
    """``count`` different mutants of ``source`` (all there are, if fewer), chosen by ``seed``."""
    places = [(node, changed) for node, changed in _all(ast.parse(source))]
    random.Random(seed).shuffle(places)
    found: dict[bytes, Mutant] = {}
    for node, changed in places:
        if len(found) == count:
            break
        text = "pass" if changed is None else ast.unparse(changed)
        old = ast.get_source_segment(source, node) or ""
        new = f"({text})" if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp) else text
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
        mutated = source.encode()[:start] + new.encode() + source.encode()[end:]
        line = " ".join(lines[node.lineno - 1].decode().split())
        words = f"{' '.join(old.split())} -> {text} in `{line}`"
        found.setdefault(mutated, Mutant(source=mutated, words=words))
    return list(found.values())


def _all(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | None]]:
    """Every place with what may stand there instead; None for a statement that is left out."""
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # its docstring
            inside = [*ast.walk(statement)]
            asserted = {id(n) for r in inside if isinstance(r, ast.Raise) for n in ast.walk(r)}
            for node in inside:
                if id(node) not in asserted:
                    yield from _changes(node)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | None]]:
    if isinstance(node, ast.BinOp):
        if type(node.op) in SWAPS:
            yield node, _with(node, op=SWAPS[type(node.op)]())
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            yield node, node.left  # a dropped term
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield node, _with(node, ops=[SWAPS[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield node, _with(node, op=SWAPS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
        yield node, ast.Constant(value + 1 if isinstance(value, int) else value * 1.25 + 0.125)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        other = NARROWER.get(node.attr) or OTHERS.get(node.attr)
        if other and node.value.id in ("tl", "torch"):
            yield node, _with(node, attr=other)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, None  # a dropped statement
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node, node.operand


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
