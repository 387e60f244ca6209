"""Folds what a spec decides into a function's syntax tree: expressions, branches, names that hold one decided value.

A value is *decided* if it comes from the spec (a flag, a comparison of one, a choice by one). Only decided values are
folded: literals that the author wrote stay where they are, so the result reads like the template.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Stmts = list[ast.stmt]


class SpecialiseError(ValueError):
    """The template does something that cannot be specialised; says where."""


class SpecRef:
    """The decided value that stands for the spec itself."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.flags = dict(flags)

    def flag(self, node: ast.Attribute) -> Any:
        """The value of ``spec.<flag>``.

        Raises:
            SpecialiseError: there is no such flag (sizes come from tensors).
        """
        if node.attr not in self.flags:
            raise SpecialiseError(
                f"line {node.lineno}: spec.{node.attr} is not a flag; there are: {', '.join(sorted(self.flags))}"
            )
        return self.flags[node.attr]


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"bool": bool, "float": float, "int": int, "str": str, "len": len}


def decided(node: ast.AST) -> bool:
    """Whether the node's value comes from the spec."""
    return hasattr(node, "known")


def literal(value: Any, at: ast.AST) -> ast.expr:
    """A node for a decided value, placed where ``at`` was."""
    node: ast.expr
    if isinstance(value, SpecRef):
        node = ast.Name(id="spec", ctx=ast.Load())
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        # -7.0 as a bare constant would lose its parentheses in -7.0 ** 2
        node = ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=-value))
    else:
        node = ast.Constant(value=value)
    ast.copy_location(node, at)
    ast.fix_missing_locations(node)
    setattr(node, "known", value)  # noqa: B010  (an attribute that ast does not declare)
    return node


def _constant(node: ast.expr) -> tuple[bool, Any, bool]:
    """(is it constant, its value, does it come from the spec)."""
    if decided(node):
        return True, node.known, True  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant):
        return True, node.value, False
    if isinstance(node, (ast.Tuple, ast.List)):
        parts = [_constant(e) for e in node.elts]
        if all(p[0] for p in parts):
            return True, tuple(p[1] for p in parts), any(p[2] for p in parts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        is_constant, value, from_spec = _constant(node.operand)
        if is_constant and isinstance(value, (int, float)):
            return True, -value, from_spec
    return False, None, False


def bound_names(node: ast.AST) -> list[str]:
    """Every name that ``node`` binds anywhere inside, once for each binding."""
    names: list[str] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            names += [inner.id] if not isinstance(inner.ctx, ast.Load) else []
        elif isinstance(inner, ast.arg):
            names.append(inner.arg)
        elif isinstance(inner, (ast.FunctionDef, ast.ExceptHandler)) and inner.name:
            names.append(inner.name)
    return names


class Folder(ast.NodeTransformer):
    """One pass over a function's body with the decided values of its names."""

    def __init__(self, env: Mapping[str, Any], calls: Callable[[ast.Call], ast.expr] | None = None) -> None:
        self.env = env
        self.calls = calls

    # ---- expressions ------------------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.env and not decided(node):
            return literal(self.env[node.id], node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        value = getattr(node.value, "known", None)
        return literal(value.flag(node), node) if isinstance(value, SpecRef) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        parts = [_constant(e) for e in (node.left, *node.comparators)]
        if not all(p[0] for p in parts) or not any(p[2] for p in parts):
            return node
        values = [p[1] for p in parts]
        pairs = zip(node.ops, values, values[1:], strict=False)
        return literal(all(_COMPARE[type(op)](a, b) for op, a, b in pairs), node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        stops = isinstance(node.op, ast.Or)  # the truth value that ends the evaluation
        kept: list[ast.expr] = []
        for operand in node.values:
            if decided(operand) and bool(operand.known) == stops:  # type: ignore[attr-defined]
                # what comes before a False of `and` cannot change the truth, only (if pure) be dropped
                if not kept or all(map(is_pure, kept)):
                    return operand
                kept.append(operand)
                break
            if not decided(operand) or operand is node.values[-1]:
                kept.append(operand)
        last = kept[-1]
        neutral = decided(last) and bool(last.known) != stops  # type: ignore[attr-defined]
        if len(kept) > 1 and neutral and all(map(_is_truth, kept[:-1])):
            kept.pop()
        if len(kept) == 1:
            return kept[0]
        node.values = kept
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if decided(node):
            return node
        self.generic_visit(node)
        if decided(node.operand):
            value = node.operand.known  # type: ignore[attr-defined]
            if isinstance(node.op, ast.Not):
                return literal(not value, node)
            if isinstance(node.op, ast.USub):
                return literal(-value, node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        (left_is, left, left_spec), (right_is, right, right_spec) = _constant(node.left), _constant(node.right)
        if left_is and right_is and (left_spec or right_spec) and type(node.op) in _ARITHMETIC:
            return literal(_ARITHMETIC[type(node.op)](left, right), node)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        if decided(node.test):
            chosen = node.body if node.test.known else node.orelse  # type: ignore[attr-defined]
            is_constant, value, _ = _constant(chosen)
            # a choice by the spec is decided by the spec, even between literals
            return literal(value, node) if is_constant and isinstance(chosen, ast.Constant) else chosen
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        conversion = _CONVERSIONS.get(dotted(node.func))
        if conversion and len(node.args) == 1 and decided(node.args[0]):
            return literal(conversion(node.args[0].known), node)  # type: ignore[attr-defined]
        return self.calls(node) if self.calls else node

    # ---- statements -------------------------------------------------------------------------------------------

    def block(self, statements: Stmts) -> Stmts:
        """The statements that are left; nothing follows a return, raise, break or continue."""
        kept: Stmts = []
        for statement in statements:
            result = self.visit(statement)
            kept.extend(result if isinstance(result, list) else [result] if result is not None else [])
            for i, new in enumerate(kept):
                if isinstance(new, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                    return kept[: i + 1]
        return kept

    def visit_If(self, node: ast.If) -> ast.stmt | Stmts | None:
        node.test = self.visit(node.test)
        if decided(node.test):
            live = self.block(node.body if node.test.known else node.orelse)  # type: ignore[attr-defined]
            if live and node.test.known:  # type: ignore[attr-defined]
                inherit_comments(live[0], node)
            return live
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        if not node.body and not node.orelse and is_pure(node.test):
            return None
        if not node.body and node.orelse:
            node.test = ast.copy_location(ast.UnaryOp(op=ast.Not(), operand=node.test), node.test)
            node.body, node.orelse = node.orelse, []
        node.body = node.body or [ast.copy_location(ast.Pass(), node)]
        return node

    def _visit_loop(self, node: ast.For | ast.While) -> ast.stmt | None:
        for field in ("target", "iter", "test"):
            if hasattr(node, field):
                setattr(node, field, self.visit(getattr(node, field)))
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        if isinstance(node, ast.For) and not node.body and is_pure(node.iter):
            return None
        node.body = node.body or [ast.copy_location(ast.Pass(), node)]
        return node

    visit_For = visit_While = _visit_loop

    def visit_With(self, node: ast.With) -> ast.stmt:
        node.items = [self.visit(item) for item in node.items]
        node.body = self.block(node.body) or [ast.copy_location(ast.Pass(), node)]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt | None:
        self.generic_visit(node)
        return None if decided(node.test) and node.test.known else node  # type: ignore[attr-defined]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        self.generic_visit(node)
        call = node.value
        if isinstance(call, ast.Call) and dotted(call.func) == "tl.static_assert" and decided(call.args[0]):
            if not call.args[0].known:  # type: ignore[attr-defined]
                raise SpecialiseError(f"line {node.lineno}: static_assert fails for this spec")
            return None
        return node


def inherit_comments(first: ast.stmt, owner: ast.stmt) -> None:
    """A branch that replaces its ``if`` keeps the comment above the ``if``."""
    first.lead = [*getattr(owner, "lead", []), *getattr(first, "lead", [])]  # type: ignore[attr-defined]


# ---- purity and dead names ----------------------------------------------------------------------------------------

_IMPURE_TL = ("store", "atomic_", "device_", "debug_", "static_", "inline_asm")
_PURE_ATTRIBUTES = ("to", "contiguous", "view", "reshape", "expand", "float", "double", "trans", "broadcast_to", "sum")
_PURE_METHODS = frozenset((*_PURE_ATTRIBUTES, "numel", "size", "stride", "dim", "get", "keys", "bit_length"))
_PURE_ALLOCATIONS = frozenset(("new_empty", "new_zeros"))
_PURE_BUILTINS = frozenset(("min", "max", "int", "float", "bool", "len", "abs", "tuple", "range"))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_pure(node: ast.AST, pure_functions: Iterable[str] = ()) -> bool:
    """Whether evaluating ``node`` can only yield a value."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        if isinstance(inner, ast.Call) and not _pure_call(inner, pure_functions):
            return False
    return True


def _pure_call(call: ast.Call, pure_functions: Iterable[str]) -> bool:
    name = dotted(call.func)
    root, _, rest = name.partition(".")
    if root in ("tl", "torch", "triton", "math") and rest:
        return not rest.startswith(_IMPURE_TL) and not rest.endswith("_")
    if name in _PURE_BUILTINS or name in pure_functions:
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in _PURE_METHODS | _PURE_ALLOCATIONS


def _is_truth(node: ast.expr) -> bool:
    """Whether the node's value is True or False itself."""
    if isinstance(node, ast.BoolOp):
        return all(map(_is_truth, node.values))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def decided_names(function: ast.FunctionDef, kernel: bool) -> dict[str, Any]:
    """Local names that are bound once, to a decided value.

    In a kernel, numbers only where the author says ``tl.constexpr``: elsewhere an assignment turns them into fp32 or
    int32 tensors, and folding on in double precision could round differently.
    """
    counts: dict[str, int] = {}
    for name in bound_names(ast.Module(body=function.body, type_ignores=[])):
        counts[name] = counts.get(name, 0) + 1
    parameters = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value, annotated = node.targets[0], node.value, False
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value, annotated = node.target, node.value, True
        else:
            continue
        if not isinstance(target, ast.Name) or not decided(value):
            continue
        if target.id in parameters or counts[target.id] != 1:
            continue
        known = value.known  # type: ignore[attr-defined]
        if kernel and not annotated and not (known is None or isinstance(known, (bool, str))):
            continue
        found[target.id] = known
    return found


class DeadNames(ast.NodeTransformer):
    """Drops assignments of pure values to names that nobody reads."""

    def __init__(self, function: ast.FunctionDef, pure_functions: Iterable[str]) -> None:
        self.read = {
            n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        self.pure_functions = set(pure_functions)
        self.dropped = False

    def _dead(self, target: ast.expr, value: ast.expr | None) -> bool:
        targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if not all(isinstance(t, ast.Name) and t.id not in self.read for t in targets):
            return False
        return value is None or is_pure(value, self.pure_functions)

    def _visit_assignment(self, node: Any) -> Any:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) != 1:
            return node
        if self._dead(targets[0], node.value):
            self.dropped = True
            return None
        target, value = targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = zip(target.elts, value.elts, strict=True)
            kept = [(t, v) for t, v in pairs if not self._dead(t, v)]
            if len(kept) < len(target.elts):
                self.dropped = True
                target.elts, value.elts = [t for t, _ in kept], [v for _, v in kept]
                if len(kept) == 1:
                    node.targets, node.value = [kept[0][0]], kept[0][1]
        return node

    visit_Assign = visit_AnnAssign = visit_AugAssign = _visit_assignment
