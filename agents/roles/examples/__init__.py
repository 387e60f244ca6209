"""Worked examples of candidates: a reference in the suite's form, and a kernel that the judge accepted for it.

Text, not modules: they are shown to a language model and judged in tests, never imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("rows", "attention", "recurrence")
_PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "linear", "scaled_dot_product_attention"})


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example."""

    name: str
    reference: str
    kernel: str


@cache
def load(name: str) -> Example:
    """One example, by a name out of :data:`NAMES`."""
    reference, kernel = ((HERE / f"{name}.{part}.txt").read_text() for part in ("reference", "kernel"))
    return Example(name=name, reference=reference, kernel=kernel)


def nearest(reference: str) -> Example:
    """The example whose structure a reference has: a walk through time, products of tiles, or else plain rows."""
    try:
        nodes = list(ast.walk(ast.parse(reference)))
    except (SyntaxError, ValueError):
        return load("rows")
    if any(isinstance(node, ast.For | ast.While) for node in nodes):
        return load("recurrence")
    return load("attention" if any(_multiplies(node) for node in nodes) else "rows")


def _multiplies(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    function = node.func if isinstance(node, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _PRODUCTS
