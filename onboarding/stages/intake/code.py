"""Reading the definition's own Python files with ``ast``: what they import and what looks dangerous. Never executed."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass

from onboarding.problem import Problem

_SUSPICIOUS = {
    "eval", "exec", "compile", "__import__", "open", "input", "breakpoint",
    "os.system", "os.popen", "os.remove", "os.unlink", "shutil.rmtree", "pickle.load", "pickle.loads",
    "torch.load", "marshal.loads", "ctypes.CDLL", "importlib.import_module",
}  # fmt: skip
_SUSPICIOUS_MODULES = {"subprocess", "socket", "ctypes", "requests", "urllib", "http", "pickle", "marshal", "pty"}


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """What the definition's Python files say about themselves."""

    imports: tuple[str, ...]
    """Top-level packages outside the standard library and the definition itself, sorted."""
    suspicious: tuple[str, ...]
    """``file:line call``, for the report: the code runs only in the sandbox anyway."""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def parse_python(name: str, content: bytes) -> ast.Module:
    """The syntax tree of one file.

    Raises:
        Problem: ``code-syntax-error`` with file and line.
    """
    try:
        return ast.parse(content, filename=name)
    except SyntaxError as error:
        raise Problem(
            "code-syntax-error",
            f"{name} is not valid Python",
            f"line {error.lineno}: {error.msg}",
            file=name,
            line=error.lineno or 0,
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes; nesting that no parser survives
        raise Problem("code-syntax-error", f"{name} cannot be read as Python", str(error), file=name, line=0) from None


def read_code(files: dict[str, bytes]) -> CodeFacts:
    """Read every ``.py`` file of a definition.

    Raises:
        Problem: ``code-syntax-error`` for the first file that does not parse.
    """
    sources = {name: content for name, content in sorted(files.items()) if name.endswith(".py")}
    own = {name.rsplit("/", 1)[-1].removesuffix(".py") for name in sources} | {n.split("/")[0] for n in sources}
    imports: set[str] = set()
    suspicious: list[str] = []
    for name, content in sources.items():
        for node in ast.walk(parse_python(name, content)):
            packages = _imported(node)
            imports |= packages
            suspicious += [f"{name}:{node.lineno} import {p}" for p in sorted(packages & _SUSPICIOUS_MODULES)]  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and _dotted(node.func) in _SUSPICIOUS:
                suspicious.append(f"{name}:{node.lineno} {_dotted(node.func)}()")
    foreign = imports - set(sys.stdlib_module_names) - own
    return CodeFacts(imports=tuple(sorted(foreign)), suspicious=tuple(suspicious))


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return {node.module.split(".")[0]}
    return set()
