"""What a candidate's source may contain. A bundle's kernels are imported outside the sandbox, so code that has no place
in a kernel module is refused even when its numbers are right. Early and cheap; acceptance needs every trial besides.

Read with ``ast`` only: nothing of the candidate is imported here.
"""

from __future__ import annotations

import ast
import math
import types
from dataclasses import dataclass

import torch
import triton

ALLOWED_IMPORTS = frozenset({"__future__", "math", "torch", "triton"})
FORBIDDEN_NAMES = frozenset(
    {"breakpoint", "compile", "delattr", "dir", "eval", "exec", "exit", "getattr", "globals", "help", "input"}
    | {"locals", "open", "quit", "setattr", "vars", "__builtins__", "__import__", "__loader__", "__spec__"}
)
# Functions of torch that reach files, processes or other people's code; its submodules are refused as a kind.
FORBIDDEN_OF_TORCH = frozenset(
    {"compile", "classes", "from_file", "hub", "import_ir_module", "load", "ops", "save"}
    | {"set_default_device", "set_default_dtype"}
)
ALLOWED_OF_CUDA = frozenset(
    {"current_device", "device_count", "get_device_capability", "get_device_properties", "is_available"}
)
"""Questions about the device; streams, graphs, events and memory are the caller's."""
ALLOWED_MODULES = frozenset({"math", "torch", "torch.cuda", "triton", "triton.language", "triton.language.math"})
"""Every other module that an attribute leads to is refused: ``torch.os`` is the operating system."""
ROOTS: dict[str, types.ModuleType] = {
    "math": math,
    "torch": torch,
    "triton": triton,
    "tl": triton.language,
}
MUTATING = frozenset(
    {"append", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse"}
    | {"setdefault", "sort", "update"}
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that has no place in a kernel module."""

    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


def findings(source: bytes) -> list[Finding]:
    """Everything in a candidate's source that is not allowed, in order of lines; empty for a clean one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [Finding(line=getattr(error, "lineno", None) or 1, what=f"the candidate is not valid Python: {error}")]
    reader = _Reader({name for node in tree.body for name in _assigned(node)})
    for node in tree.body:
        reader.top_level(node)
    reader.visit(tree)
    return sorted(reader.found, key=lambda finding: finding.line)


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


class _Reader(ast.NodeVisitor):
    """Collects what is not allowed."""

    def __init__(self, constants: set[str]) -> None:
        self.constants = constants
        self.found: list[Finding] = []

    def add(self, node: ast.AST, what: str) -> None:
        self.found.append(Finding(line=getattr(node, "lineno", 1), what=what))

    def top_level(self, node: ast.stmt) -> None:
        """A module consists of imports, constants and functions: importing it does nothing."""
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
                if _root(call.func) not in ("tl", "triton"):
                    self.add(call, "the candidate calls a function while it is imported")
            return
        self.add(node, f"the candidate runs {type(node).__name__} while it is imported")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported(node, alias.name, alias.name)
            if alias.asname is not None and (alias.name, alias.asname) != ("triton.language", "tl"):
                self.add(node, f"the candidate renames {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            self._imported(node, module, f"{module}.{alias.name}")
            if alias.asname is not None:
                self.add(node, f"the candidate renames {alias.name}")

    def _imported(self, node: ast.AST, module: str, name: str) -> None:
        first = module.split(".")[0]
        if first not in ALLOWED_IMPORTS:
            self.add(node, f"the candidate imports {module}")
        elif first != "__future__":
            self._reaches(node, name.split("."))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in FORBIDDEN_NAMES:
            self.add(node, f"the candidate uses {node.id}")
        if node.id in ROOTS:
            self.add(node, f"the candidate hands the module {node.id} around")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.startswith("_"):
            self.add(node, f"the candidate reaches for {node.attr}")
        if isinstance(node.ctx, ast.Store | ast.Del):
            self.add(node, f"the candidate changes the attribute {node.attr}")
        path = _path(node)
        if path and path[0] in ROOTS:
            self._reaches(node, path)
        else:
            self.generic_visit(node)

    def _reaches(self, node: ast.AST, path: list[str]) -> None:
        """Follow a path of attributes from one of the modules that a candidate may use."""
        found: object = ROOTS.get(path[0])
        for depth, name in enumerate(path[1:], start=2):
            forbidden = path[0] == "torch" and name in FORBIDDEN_OF_TORCH
            of_cuda = path[: depth - 1] == ["torch", "cuda"] and name not in ALLOWED_OF_CUDA
            if name.startswith("_") or forbidden or of_cuda:
                self.add(node, f"the candidate reaches for {'.'.join(path[:depth])}")
                return
            found = getattr(found, name, None)
            if isinstance(found, types.ModuleType) and found.__name__ not in ALLOWED_MODULES:
                self.add(node, f"the candidate reaches for {'.'.join(path[:depth])}")
                return

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del) and _root(node.value) in self.constants:
            self.add(node, "the candidate keeps state between calls in a module's variable")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in MUTATING and _root(function) in self.constants:
            self.add(node, "the candidate keeps state between calls in a module's variable")
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            if _root(decorator) not in ("triton",):
                self.add(decorator, "the candidate decorates a function with something else than triton's")
        for default in [*node.args.defaults, *[d for d in node.args.kw_defaults if d is not None]]:
            if not isinstance(default, ast.Constant | ast.Name | ast.Attribute | ast.UnaryOp):
                self.add(default, "the candidate has a default that could keep state between calls")
        self.generic_visit(node)

    def _refused(self, node: ast.AST) -> None:
        self.add(node, f"the candidate has a {type(node).__name__} statement")
        self.generic_visit(node)

    visit_ClassDef = visit_AsyncFunctionDef = visit_Global = visit_Nonlocal = visit_Try = visit_TryStar = _refused
    visit_Yield = visit_YieldFrom = visit_Await = _refused


def _path(node: ast.expr) -> list[str]:
    """``["a", "b", "c"]`` of ``a.b.c``; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _root(node: ast.expr) -> str:
    """The leftmost name of ``a.b[c].d(...)``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
