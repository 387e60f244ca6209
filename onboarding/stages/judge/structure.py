"""What a candidate's source may contain. A bundle's kernels are imported outside the sandbox, so code that has no place
in a kernel module is refused even when its numbers are right. Early and cheap; acceptance needs every trial besides.

Read with ``ast`` only: nothing of the candidate is imported here.
"""

from __future__ import annotations

import ast
import builtins
import math
import types
from dataclasses import dataclass

import torch
import triton

ALLOWED_IMPORTS = frozenset({"__future__", "math", "torch", "triton"})
ROOTS: dict[str, types.ModuleType] = {
    "math": math,
    "torch": torch,
    "triton": triton,
    "tl": triton.language,
}
CONTRACT = frozenset({"FAMILY", "SPEC", "INPUTS", "OUTPUTS", "TRAITS", "CONFIGS", "DETERMINISM", "INTERPRETER"})
"""Constants that others read; they may be dicts and lists, which the candidate's own functions do not touch."""
IMMUTABLE_MADE_BY = frozenset({"tl.constexpr", "triton.Config"})

# What code may use is listed, not what it may not: every list of what is dangerous was found to have holes
# (``generator.gi_frame.f_builtins``, ``torch.initial_seed`` as a counter, ``x.numpy().tofile``).
BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "frozenset", "int", "isinstance", "len"}
    | {"list", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple"}
    | {"zip", "ArithmeticError", "AssertionError", "IndexError", "KeyError", "NotImplementedError", "RuntimeError"}
    | {"TypeError", "ValueError"}
)
_DTYPES = frozenset(
    {"bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"}
    | {"float8_e4m3fn", "float8_e5m2"}
)
OF_TORCH = _DTYPES | frozenset(
    {"Size", "Tensor", "contiguous_format", "device", "dtype", "finfo", "iinfo", "no_grad", "preserve_format"}
    # makes, moves and adds up
    | {"as_strided", "cat", "clone", "concat", "empty", "empty_like", "empty_strided", "flatten", "full", "full_like"}
    | {"movedim", "narrow", "ones", "ones_like", "permute", "reshape", "select", "split", "squeeze", "stack", "sum"}
    | {"tensor", "transpose", "unbind", "unsqueeze", "zeros", "zeros_like", "add", "addmm", "mm", "broadcast_shapes"}
    # on whole numbers; the log of operators refuses them on others
    | {"all", "any", "arange", "argsort", "bincount", "bucketize", "cumsum", "diff", "div", "eq", "floor_divide"}
    | {"gather", "ge", "gt", "index_select", "is_tensor", "le", "lt", "max", "maximum", "min", "minimum", "mul"}
    | {"nonzero", "remainder", "repeat_interleave", "scatter", "searchsorted", "sort", "sub", "topk", "where"}
)
OF_CUDA = frozenset(
    {"current_device", "device_count", "get_device_capability", "get_device_properties", "is_available"}
)
"""Questions about the device; streams, graphs, events and memory are the caller's."""
OF_TRITON = frozenset({"Config", "autotune", "cdiv", "jit", "language", "next_power_of_2"})
NOT_OF_LANGUAGE = frozenset({"device_assert", "device_print", "inline_asm_elementwise", "static_print"})
ATTRIBUTES = frozenset(
    # of tensors: facts, views, copies
    {
        "T",
        "device",
        "dim",
        "dtype",
        "element_size",
        "is_contiguous",
        "is_cuda",
        "is_floating_point",
        "itemsize",
        "layout",
    }
    | {"mT", "ndim", "numel", "requires_grad", "shape", "size", "storage_offset", "stride", "is_complex"}
    | {"as_strided", "bfloat16", "bool", "broadcast_to", "chunk", "clone", "contiguous", "cpu", "detach", "double"}
    | {"expand", "expand_as", "flatten", "flip", "float", "half", "int", "long", "movedim", "narrow", "new_empty"}
    | {"new_empty_strided", "new_full", "new_ones", "new_zeros", "permute", "repeat", "reshape", "select", "split"}
    | {"split_with_sizes", "squeeze", "swapaxes", "t", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze"}
    | {"view", "view_as", "copy_", "fill_", "zero_", "add", "add_", "sum"}
    # of tensors of whole numbers; the log of operators refuses them on others
    | {
        "all",
        "amax",
        "amin",
        "any",
        "argsort",
        "clamp",
        "clamp_",
        "cumsum",
        "div",
        "div_",
        "eq",
        "floor_divide",
        "gather",
    }
    | {"ge", "gt", "index_add_", "index_copy_", "index_fill_", "index_select", "item", "le", "lt", "masked_fill"}
    | {"masked_fill_", "max", "min", "mul", "mul_", "ne", "nonzero", "remainder", "repeat_interleave", "scatter"}
    | {"scatter_", "scatter_add_", "sort", "sub", "sub_", "tolist", "topk"}
    # of devices, dtypes, numbers, containers
    | {"bits", "eps", "index", "major", "minor", "multi_processor_count", "name", "smallest_normal", "tiny"}
    | {"total_memory", "type", "bit_length", "is_integer", "append", "copy", "count", "extend", "get", "insert"}
    | {"items", "keys", "pop", "setdefault", "update", "values", "endswith", "join", "startswith"}
    # in kernels
    | {"cast", "element_ty", "is_bf16", "is_floating", "is_fp16", "is_fp32", "is_fp64", "is_int", "primitive_bitwidth"}
    | {"trans", "value"}
)
"""Attributes of values. Of modules see above."""


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
    reader = _Reader({name for node in tree.body if _is_mutable(node) for name in _assigned(node)} | CONTRACT)
    for node in tree.body:
        reader.top_level(node)
    reader.visit(tree)
    return sorted(set(reader.found), key=lambda finding: (finding.line, finding.what))


def atomics_in(source: bytes) -> bool:
    """Whether some kernel adds up by atomic operations."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(n, ast.Attribute) and n.attr.startswith("atomic_") for n in ast.walk(tree))


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _assigned(node: ast.stmt) -> list[str]:
    """Names that a statement of the module binds."""
    targets = {name.id for target in _targets(node) for name in ast.walk(target) if isinstance(name, ast.Name)}
    inside = {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}
    return sorted(targets | inside)


def _is_mutable(node: ast.stmt) -> bool:
    """Whether a module's constant could change: it is no number, string, tuple, dtype or function."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp
    return value is not None and any(isinstance(n, displays) for n in ast.walk(value))


class _Reader(ast.NodeVisitor):
    """Collects what is not allowed."""

    def __init__(self, mutable: set[str] | frozenset[str]) -> None:
        self.mutable = mutable
        self.found: list[Finding] = []
        self._inside = 0

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
                if ".".join(_path(call.func)) not in IMMUTABLE_MADE_BY:
                    self.add(call, "the candidate calls a function while it is imported")
            if CONTRACT.intersection(_assigned(node)) and (
                not all(isinstance(target, ast.Name) for target in _targets(node))
                or any(isinstance(n, ast.NamedExpr) for n in ast.walk(node))
            ):
                self.add(node, f"the candidate states {', '.join(_assigned(node))} in a roundabout way")
            if _is_mutable(node) and not CONTRACT.issuperset(_assigned(node)):
                self.add(node, f"the candidate keeps state between calls: {', '.join(_assigned(node))} can change")
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
            if alias.name == "*":
                self.add(node, f"the candidate imports everything of {module}")
            if alias.asname is not None:
                self.add(node, f"the candidate renames {alias.name}")

    def _imported(self, node: ast.AST, module: str, name: str) -> None:
        first = module.split(".")[0]
        if first not in ALLOWED_IMPORTS:
            self.add(node, f"the candidate imports {module}")
        elif first != "__future__":
            self._reaches(node, name.split("."))

    def visit_Name(self, node: ast.Name) -> None:
        if (hasattr(builtins, node.id) and node.id not in BUILTINS) or node.id.startswith("__"):
            self.add(node, f"the candidate uses {node.id}")
        if node.id in ROOTS:
            self.add(node, f"the candidate hands the module {node.id} around")
        if self._inside and node.id in self.mutable:
            self.add(node, f"the candidate keeps state between calls: {node.id} can change")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self.add(node, f"the candidate changes the attribute {node.attr}")
        path = _path(node)
        if path and path[0] in ROOTS:
            self._reaches(node, path)
        else:
            if node.attr not in ATTRIBUTES:
                self.add(node, f"the candidate reaches for {node.attr}")
            self.generic_visit(node)

    def _reaches(self, node: ast.AST, path: list[str]) -> None:
        """Follow a path of attributes from one of the modules that a candidate may use."""
        for depth in range(2, len(path) + 1):
            if not _may_reach(path[:depth]):
                self.add(node, f"the candidate reaches for {'.'.join(path[:depth])}")
                return

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            if _root(decorator) not in ("triton",):
                self.add(decorator, "the candidate decorates a function with something else than triton's")
            self.visit(decorator)
        self._defaults(node.args)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        for annotation in [*[a.annotation for a in every if a is not None], node.returns]:
            if annotation is not None:  # run when the function is made, unless annotations are postponed
                self.visit(annotation)
                if any(isinstance(n, ast.Call) for n in ast.walk(annotation)):
                    self.add(annotation, "the candidate calls a function while it is imported")
        self._inside += 1
        for statement in node.body:
            self.visit(statement)
        self._inside -= 1

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._defaults(node.args)
        self._inside += 1
        self.visit(node.body)
        self._inside -= 1

    def _defaults(self, arguments: ast.arguments) -> None:
        for default in [*arguments.defaults, *[d for d in arguments.kw_defaults if d is not None]]:
            names = {n.id for n in ast.walk(default) if isinstance(n, ast.Name)}
            plain = isinstance(default, ast.Constant | ast.Name | ast.Attribute | ast.UnaryOp)
            if not plain or names & self.mutable:
                self.add(default, "the candidate has a default that could keep state between calls")
            self.visit(default)

    def _refused(self, node: ast.AST) -> None:
        self.add(node, f"the candidate has a {type(node).__name__} statement")
        self.generic_visit(node)

    visit_ClassDef = visit_AsyncFunctionDef = visit_Global = visit_Nonlocal = visit_Try = visit_TryStar = _refused
    visit_Yield = visit_YieldFrom = visit_Await = visit_MatchClass = _refused


def _may_reach(path: list[str]) -> bool:
    """Whether code may use what a path of attributes leads to."""
    match path:
        case ["math", name]:
            return not name.startswith("_")
        case ["torch", "cuda"] | ["triton", "language", "math"] | ["tl", "math"]:
            return True
        case ["torch", "cuda", name]:
            return name in OF_CUDA
        case ["torch", name]:
            return name in OF_TORCH
        case ["triton", name]:
            return name in OF_TRITON
        case ["tl", name] | ["tl", "math", name] | ["triton", "language", *_, name] if len(path) <= 4:
            found = getattr(triton.language, name, None) or getattr(triton.language.math, name, None)
            return not (name.startswith("_") or name in NOT_OF_LANGUAGE or isinstance(found, types.ModuleType))
    return path[-1] in ATTRIBUTES or path[-1].isupper()  # of a constant, a dtype, a function's result


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
