"""Reading the definition's own Python files with ``ast``: what they import, what looks dangerous. Never executed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onboarding import syntax
from onboarding.problem import Problem

_SUSPICIOUS = {
    "eval", "exec", "compile", "__import__", "open", "input", "breakpoint", "globals",
    "pickle.load", "pickle.loads", "torch.load", "marshal.loads", "importlib.import_module", "shutil.rmtree",
    "sys.exit", "os._exit", "torch.hub.load", "torch.ops.load_library", "torch.utils.cpp_extension.load",
    "torch.utils.cpp_extension.load_inline",
}  # fmt: skip
_HARMLESS_OS = ("os.path.", "os.environ.get", "os.getenv", "os.cpu_count")
_SUSPICIOUS_MODULES = {
    "subprocess", "socket", "ctypes", "requests", "urllib", "urllib3", "http", "httpx", "aiohttp", "pickle", "marshal",
    "pty", "multiprocessing", "signal", "ftplib", "telnetlib", "smtplib", "cffi", "gc",
}  # fmt: skip
_SUSPICIOUS_NAMES = {"__subclasses__", "__globals__", "__builtins__", "__loader__", "__code__"}
LANGUAGE_MODELS = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForVision2Seq",
    "AutoModelForSeq2SeqLM",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """What the definition's Python files say about themselves."""

    imports: tuple[str, ...]
    """Top-level packages outside the standard library and the definition itself, sorted."""
    suspicious: tuple[str, ...]
    """``file:line call``, for the report: the code runs only in the sandbox anyway."""
    optional: tuple[str, ...] = ()
    """Those of the imports that the code can do without: every one of them is guarded."""


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that serve a definition, as ``module:Class`` with the module's dotted path in the definition."""

    model: str
    config: str = ""
    """Empty: the model's own ``config_class``."""
    entry: bool = False
    """Named by ``entry_point``: any torch module."""


def parse_python(name: str, content: bytes) -> ast.Module:
    """The syntax tree of one file.

    Raises:
        Problem: ``code-syntax-error`` with file and line.
    """
    try:
        return syntax.parse(content, name)
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
        Problem: ``code-syntax-error`` for the first file that does not parse, ``code-file-missing`` for the first
            unguarded relative import of a file that is not there.
    """
    sources = {name: content for name, content in sorted(files.items()) if name.endswith(".py")}
    own = {name.rsplit("/", 1)[-1].removesuffix(".py") for name in sources} | {n.split("/")[0] for n in sources}
    needed: set[str] = set()
    guarded: set[str] = set()
    suspicious: list[str] = []
    for name, content in sources.items():
        tree = parse_python(name, content)
        try:
            for node, optional in _walk(tree):
                (guarded if optional else needed).update(_imported(node))
                if isinstance(node, ast.ImportFrom) and node.level and not optional:
                    _check_relative(name, node, sources)
            suspicious += _suspicious(name, tree)
        except RecursionError:
            raise Problem("code-syntax-error", f"{name} is nested too deeply to read", "", file=name, line=0) from None
    foreign = (needed | guarded) - set(sys.stdlib_module_names) - own
    return CodeFacts(
        imports=tuple(sorted(foreign)),
        suspicious=tuple(dict.fromkeys(suspicious)),
        optional=tuple(sorted(foreign - needed)),
    )


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether an import there may fail: inside a try with handlers, an if, or a function."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, optional = waiting.pop()
        yield node, optional
        loose = optional or isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef)
        loose = loose or (isinstance(node, ast.Try) and bool(node.handlers))
        waiting += [(child, loose) for child in ast.iter_child_nodes(node)]


def _imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return {node.module.split(".")[0]}
    return set()


def _check_relative(name: str, node: ast.ImportFrom, sources: dict[str, bytes]) -> None:
    """A relative import must lead to a file of the definition."""
    folder = name.split("/")[:-1]
    if node.level - 1 > len(folder):
        raise _no_file(name, node, "." * node.level + (node.module or ""))
    base = folder[: len(folder) - (node.level - 1)]
    wanted = [*base, *(node.module.split(".") if node.module else [])]
    if node.module is None:  # from . import layers
        lacking = [a.name for a in node.names if not _is_there([*base, a.name], sources)]
        if lacking and not _is_there([*base, "__init__"], sources):
            raise _no_file(name, node, lacking[0])
    elif not _is_there(wanted, sources):
        raise _no_file(name, node, ".".join(wanted))


def _is_there(parts: list[str], sources: dict[str, bytes]) -> bool:
    path = "/".join(parts)
    return f"{path}.py" in sources or any(source.startswith(f"{path}/") for source in sources)


def _no_file(name: str, node: ast.ImportFrom, wanted: str) -> Problem:
    return Problem(
        "code-file-missing",
        f"{name} imports {wanted}, which the definition does not hold",
        f"line {node.lineno}: add {wanted.lstrip('.').replace('.', '/')}.py",
        file=name,
        line=node.lineno,
    )


# ---- what a reviewer should see ---------------------------------------------------------------------------------


def _suspicious(name: str, tree: ast.Module) -> list[str]:
    """Imports and calls that have no place in a model, under whatever name they were imported."""
    known = _import_names(tree)
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        found += [f"{name}:{line} import {p}" for p in sorted(_imported(node) & _SUSPICIOUS_MODULES)]
        if isinstance(node, ast.Call):
            head, _, rest = _dotted(node.func).partition(".")
            full = ".".join(filter(None, [known.get(head, head), rest]))
            if full in _SUSPICIOUS or (full.startswith("os.") and not full.startswith(_HARMLESS_OS)):
                found.append(f"{name}:{line} {full}()")
        if isinstance(node, ast.Attribute) and node.attr in _SUSPICIOUS_NAMES:
            found.append(f"{name}:{line} {node.attr}")
    return found


def _import_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it was imported as: ``from os import system as run`` gives run -> os.system."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


# ---- which classes serve it ---------------------------------------------------------------------------------------


def find_classes(config: dict[str, Any], files: dict[str, bytes]) -> Classes:
    """The model's class, and its configuration's: named by ``entry_point``, ``auto_map`` or ``architectures``.

    Raises:
        Problem: ``code-no-class`` or ``config-wrong-type``, with the field that names what is not there.
    """
    defined = defined_classes(files)
    entry = config.get("entry_point")
    if entry is not None:
        if not isinstance(entry, str) or entry.count(":") != 1:
            raise Problem(
                "config-wrong-type", "entry_point is not of the form module:Class", str(entry)[:80], field="entry_point"
            )
        return Classes(model=_located(entry.replace("/", "."), defined, "entry_point"), entry=True)
    auto = config.get("auto_map") or {}
    if not isinstance(auto, dict):
        raise Problem("config-wrong-type", "auto_map must be an object", str(auto)[:80], field="auto_map")
    for key in LANGUAGE_MODELS:
        if key in auto:
            model = _located(_auto_name(auto[key], key), defined, f"auto_map.{key}")
            own = auto.get("AutoConfig")
            known = _located(_auto_name(own, "AutoConfig"), defined, "auto_map.AutoConfig") if own else ""
            return Classes(model=model, config=known)
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        places = [place for place in defined if place.endswith(f":{name}")]
        if places:
            return Classes(model=places[0])
    raise Problem(
        "code-no-class",
        "the definition has code, but config.json does not say which class is the language model",
        'add "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}, '
        'or "entry_point": "module:Class" for a plain torch module',
        field="auto_map",
    )


def defined_classes(files: dict[str, bytes]) -> dict[str, ast.ClassDef]:
    """``module:Class`` -> the class statement, at the top of a file (in a branch or a try too)."""
    found: dict[str, ast.ClassDef] = {}
    for name, content in sorted(files.items()):
        if name.endswith(".py"):
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for node in ast.walk(parse_python(name, content)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(f"{module}:{node.name}", node)
    return found


def _auto_name(value: Any, key: str) -> str:
    """``repository--modeling_x.XForCausalLM`` as ``modeling_x:XForCausalLM``."""
    if isinstance(value, list):  # a tokenizer's pair of slow and fast, and kin
        value = next((v for v in value if v), None)
    if not isinstance(value, str) or "." not in value:
        raise Problem(
            "config-wrong-type",
            f"auto_map.{key} is not of the form module.Class",
            str(value)[:80],
            field=f"auto_map.{key}",
        )
    module, _, name = value.rpartition("--")[2].rpartition(".")
    return f"{module}:{name}"


def _located(place: str, defined: dict[str, ast.ClassDef], field: str) -> str:
    if place in defined:
        return place
    module, _, name = place.partition(":")
    elsewhere = [known for known in defined if known.endswith(f":{name}")]
    if elsewhere and any(known.partition(":")[0] == module for known in defined):
        return place  # imported into that file from another one
    in_module = [known.partition(":")[2] for known in defined if known.partition(":")[0] == module]
    if elsewhere:
        hint = f"a class of this name is in {elsewhere[0].partition(':')[0].replace('.', '/')}.py"
    elif in_module:
        hint = f"{module.replace('.', '/')}.py defines {', '.join(in_module[:8])}"
    else:
        hint = f"the definition has no class in {module.replace('.', '/')}.py"
    raise Problem("code-no-class", f"{field} names {place.replace(':', '.')}, which is not there", hint, field=field)
