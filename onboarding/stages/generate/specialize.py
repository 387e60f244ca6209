"""Partial evaluation of a template: a short, self-contained module for exactly one operator spec.

Every function of the template (host functions and kernels alike) is specialised for each distinct set of decided
values that its call sites pass: a helper that is called at two sites with different flags becomes two functions, and
never is a parameter folded because of its name. What a function no longer uses (parameters, locals, helpers, imports)
is dropped at its call sites too. The result is deterministic, byte for byte.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import pprint
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_templates.spec import OperatorSpec, TensorRole
from onboarding.stages.generate.emit import Source, emit_function
from onboarding.stages.generate.folding import (
    DeadNames,
    Folder,
    SpecialiseError,
    SpecRef,
    bound_names,
    decided,
    decided_names,
    dotted,
    is_pure,
)

ENTRIES = ("bucket", "outputs_like", "forward", "backward")
LINE_LENGTH = 120
HELPERS = "kernel_templates.tl_ops"
ALLOWED_IMPORTS = ("torch", "triton", "triton.language", "math", "__future__", HELPERS)


@dataclass
class Original:
    """A function of the template (or of the shared helpers) as its author wrote it."""

    node: ast.FunctionDef
    source: Source
    kernel: bool

    @property
    def parameters(self) -> list[str]:
        args = self.node.args
        return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


@dataclass
class Variant:
    """A function specialised for one set of decided values."""

    original: Original
    node: ast.FunctionDef
    order: tuple[int, int]
    """Place of the original, then of the variant among its siblings."""
    dropped: frozenset[str] = frozenset()
    pure: bool = False


@dataclass
class Specialised:
    """A generated module."""

    source: str
    kernels: list[str] = field(default_factory=list)
    """Names of the Triton kernels that the host functions launch."""


def specialise(template: Path, spec: OperatorSpec, helpers: Path | None = None) -> Specialised:
    """The candidate module for ``spec``.

    Args:
        template: the family's ``template.py``.
        spec: the operator.
        helpers: ``tl_ops.py``; None for the package's own.

    Raises:
        SpecialiseError: the template does something that cannot be specialised.
    """
    return _Module(template, spec, helpers or template.parents[1] / "tl_ops.py").build()


class _Module:
    """One specialisation under way."""

    def __init__(self, template: Path, spec: OperatorSpec, helpers: Path) -> None:
        self.spec = spec
        self.text = template.read_text()
        self.tree = ast.parse(self.text)
        self.ref = SpecRef(spec.flags())
        self.originals: dict[str, Original] = {}
        self.variants: dict[tuple[str, str], Variant] = {}
        self.open: set[tuple[str, str]] = set()
        self.source = Source(self.text)
        wanted = self._check_imports()
        if wanted:
            text = helpers.read_text()
            helper_tree = ast.parse(text)
            self._collect(helper_tree, Source(text))
            unknown = wanted - self.originals.keys()
            if unknown:
                raise SpecialiseError(f"{HELPERS} has no {', '.join(sorted(unknown))}")
        self._collect(self.tree, self.source)

    # ---- reading ----------------------------------------------------------------------------------------------

    def _check_imports(self) -> set[str]:
        """Names taken from the shared helpers.

        Raises:
            SpecialiseError: an import that a candidate may not have.
        """
        wanted: set[str] = set()
        for node in self.tree.body:
            modules = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for module in modules:
                if module not in ALLOWED_IMPORTS:
                    raise SpecialiseError(f"line {node.lineno}: a template may not import {module}")
            if isinstance(node, ast.ImportFrom) and node.module == HELPERS:
                if any(a.asname for a in node.names):
                    raise SpecialiseError(f"line {node.lineno}: helpers keep their names")
                wanted |= {a.name for a in node.names}
        return wanted

    def _collect(self, tree: ast.Module, source: Source) -> None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                if node.name in self.originals:
                    raise SpecialiseError(f"line {node.lineno}: {node.name} is defined twice")
                kernel = any("jit" in dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list)
                node.original_first_line = node.body[0].lineno  # type: ignore[attr-defined]
                source.mark(node)
                self.originals[node.name] = Original(node, source, kernel)

    # ---- specialising -----------------------------------------------------------------------------------------

    def variant(self, name: str, values: dict[str, Any], pinned: frozenset[str] = frozenset()) -> Variant:
        """``name`` with some parameters decided; ``pinned`` ones stay in the signature whatever happens."""
        shown = {k: "spec" if isinstance(v, SpecRef) else v for k, v in sorted(values.items())}
        key = (name, f"{shown!r} {sorted(pinned)}")
        if key in self.open:
            raise SpecialiseError(f"{name} calls itself")
        if key not in self.variants:
            self.open.add(key)
            self.variants[key] = self._specialise(name, values, pinned)
            self.open.discard(key)
        return self.variants[key]

    def _specialise(self, name: str, values: dict[str, Any], pinned: frozenset[str]) -> Variant:
        original = self.originals[name]
        node = copy.deepcopy(original.node)
        _fold(node, values, original.kernel)
        # callees first: which arguments they still want decides what this function still needs
        node.body = Folder({}, calls=self._rewrite_call).block(node.body)
        pure_functions = {v.node.name for v in self.variants.values() if v.pure}
        while True:
            dead = DeadNames(node, pure_functions)
            node.body = [s for s in map(dead.visit, node.body) if s is not None]
            _fold(node, {}, original.kernel)
            if not dead.dropped:
                break
        node.body = node.body or [ast.Pass()]
        dropped = frozenset(original.parameters) - _read(node) - pinned
        _drop_parameters(node, dropped)
        siblings = [v for v in self.variants.values() if v.original is original]
        if siblings:
            node.name = f"{name}_{len(siblings) + 1}"
        place = list(self.originals).index(name)
        pure = all(is_pure(s, pure_functions) and not _stores_to_subscript(s) for s in node.body)
        return Variant(original, node, (place, len(siblings)), dropped, pure)

    def _rewrite_call(self, call: ast.Call) -> ast.expr:
        launch = isinstance(call.func, ast.Subscript)
        function = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if not isinstance(function, ast.Name) or function.id not in self.originals:
            return call
        original = self.originals[function.id]
        if any(isinstance(a, ast.Starred) for a in call.args):
            raise SpecialiseError(f"line {call.lineno}: {function.id} is called with *arguments")
        arguments: dict[str, ast.expr] = dict(zip(original.parameters, call.args, strict=False))
        arguments |= {k.arg: k.value for k in call.keywords if k.arg in original.parameters}
        splat = any(k.arg is None for k in call.keywords)
        values = {p: a.known for p, a in arguments.items() if decided(a)}  # type: ignore[attr-defined]
        # an argument that does something stays, and so may what a ** brings
        needed = {p for p, a in arguments.items() if not is_pure(a)}
        needed |= set(original.parameters) - arguments.keys() if splat else set()
        fixed = frozenset(original.parameters) - {"spec"} if function.id in ENTRIES else frozenset()
        variant = self.variant(function.id, values, fixed)
        if variant.dropped & needed:
            variant = self.variant(function.id, values, fixed | needed)
        call.args = [a for p, a in zip(original.parameters, call.args, strict=False) if p not in variant.dropped]
        # positions shift only behind dropped ones, so what is passed by position stays so
        call.keywords = [k for k in call.keywords if k.arg is None or k.arg not in variant.dropped]
        renamed = ast.copy_location(ast.Name(id=variant.node.name, ctx=ast.Load()), function)
        if launch:
            call.func.value = renamed  # type: ignore[attr-defined]
        else:
            call.func = renamed
        return call

    # ---- writing ----------------------------------------------------------------------------------------------

    def build(self) -> Specialised:
        for entry in ENTRIES:
            if entry not in self.originals:
                raise SpecialiseError(f"the template has no function {entry}")
            pinned = frozenset(p for p in self.originals[entry].parameters if p != "spec")
            self.variant(entry, {"spec": self.ref}, pinned)
        body = self._functions(self._reachable())
        names = _names_in(body)
        body = self._constants(names) + body
        names |= _names_in(body)
        text = "\n\n".join([self._docstring(), self._imports(names), self._facts(), body])
        launched = [v.node.name for v in self._reachable() if v.original.kernel and f"{v.node.name}[" in body]
        return Specialised(formatted(text), launched)

    def _reachable(self) -> list[Variant]:
        """The variants that the entries lead to, in the template's order."""
        by_name = {v.node.name: v for v in self.variants.values()}
        wanted, found = list(ENTRIES), set()
        while wanted:
            name = wanted.pop()
            if name in by_name and name not in found:
                found.add(name)
                wanted += _read(by_name[name].node)
        return sorted((by_name[name] for name in found), key=lambda v: v.order)

    def _functions(self, variants: Iterable[Variant]) -> str:
        """The variants' source, under the template's section comments."""
        chunks: list[str] = []
        emitted_sections: set[str] = set()
        for variant in variants:
            original = variant.original
            first = min([original.node.lineno, *(d.lineno for d in original.node.decorator_list)])
            comments = [c for c in original.source.lead(first, 0) if c]
            section = _section_above(original.source, first)
            if section and section not in emitted_sections:
                emitted_sections.add(section)
                chunks.append(section)
            lines = [c for c in comments if not c.startswith("# ----")]
            changed = ast.dump(variant.node.args) != ast.dump(original.node.args) or (
                variant.node.name != original.node.name
            )
            chunks.append("\n".join([*lines, *emit_function(variant.node, original.source, changed)]))
        return "\n\n\n".join(chunks) + "\n"

    def _constants(self, names: set[str]) -> str:
        """Module-level constants of the template that are still used, with their comments."""
        lines: list[str] = []
        for node in self.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and set(bound_names(node)) & names:
                lines += [c for c in self.source.lead(node.lineno, 0) if c and not c.startswith("# ----")]
                lines += self.source.lines[node.lineno - 1 : node.end_lineno]
        return "\n".join(lines) + "\n\n\n" if lines else ""

    def _imports(self, names: set[str]) -> str:
        lines = []
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                lines.append(ast.unparse(node) + "\n")
            elif isinstance(node, ast.Import):
                used = [a for a in node.names if (a.asname or a.name).split(".")[0] in names]
                lines += [ast.unparse(ast.Import(names=[a])) for a in used]
        return "\n".join(lines)

    def _facts(self) -> str:
        facts = {
            "FAMILY": self.spec.family,
            "SPEC": self.spec.to_dict(),
            "INPUTS": {r.name: _role(r) for r in self.spec.inputs()},
            "OUTPUTS": {r.name: _role(r) for r in self.spec.outputs()},
            "TRAITS": self._traits(),
        }
        shown = {k: pprint.pformat(v, sort_dicts=False, width=LINE_LENGTH - 16) for k, v in facts.items()}
        return "\n".join(f"{k} = {v}" for k, v in shown.items())

    def _traits(self) -> Any:
        if "traits" not in self.originals:
            return {}
        node = copy.deepcopy(self.originals["traits"].node)
        _fold(node, {"spec": self.ref}, kernel=False)
        last = node.body[-1]
        if not isinstance(last, ast.Return) or last.value is None:
            raise SpecialiseError("traits(spec) must return a literal")
        try:
            return ast.literal_eval(last.value)
        except ValueError as problem:
            raise SpecialiseError(f"traits(spec) must return a literal: {problem}") from problem

    def _docstring(self) -> str:
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        flags = ", ".join(f"{k} = {v!r}" for k, v in self.spec.flags().items())
        notes = ast.get_docstring(self.tree) or ""
        text = (
            f"{self.spec.words()}: forward and backward.\n\n"
            f"Generated from the {self.spec.family} template ({digest}) for\n{flags}.\n\n"
            f"The template's notes:\n\n{notes}\n"
        )
        return '"""' + text.replace("\\", "\\\\").replace('"""', "'''") + '"""'


def _role(role: TensorRole) -> str:
    words = ("differentiable" * role.differentiable, "optional" * role.optional)
    return " ".join(filter(None, words))


def _fold(node: ast.FunctionDef, values: dict[str, Any], kernel: bool) -> None:
    """Fold until nothing changes. A parameter that the function assigns to keeps being a parameter."""
    while True:
        before = ast.dump(node)
        assigned = set(bound_names(ast.Module(body=node.body, type_ignores=[])))
        env = {k: v for k, v in values.items() if k not in assigned} | decided_names(node, kernel)
        node.body = Folder(env).block(node.body)
        if ast.dump(node) == before:
            return


def _read(node: ast.FunctionDef) -> set[str]:
    body = ast.Module(body=node.body, type_ignores=[])
    return {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}


def _names_in(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def _stores_to_subscript(node: ast.AST) -> bool:
    return any(
        isinstance(n, (ast.Subscript, ast.Attribute)) and not isinstance(n.ctx, ast.Load) for n in ast.walk(node)
    )


def _drop_parameters(node: ast.FunctionDef, dropped: Iterable[str]) -> None:
    """Take parameters out of the signature, their defaults, and the decorators that name them."""
    gone = set(dropped)
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    kept = [(a, d) for a, d in zip(plain, defaults, strict=True) if a.arg not in gone]
    args.posonlyargs = []
    args.args = [a for a, _ in kept]
    args.defaults = [d for _, d in kept if d is not None]
    keyword = [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if a.arg not in gone]
    args.kwonlyargs, args.kw_defaults = [a for a, _ in keyword], [d for _, d in keyword]
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            for option in decorator.keywords:
                if isinstance(option.value, (ast.List, ast.Tuple)):
                    option.value.elts = [
                        e for e in option.value.elts if not (isinstance(e, ast.Constant) and e.value in gone)
                    ]
            decorator.keywords = [
                k for k in decorator.keywords if not (isinstance(k.value, ast.List) and not k.value.elts)
            ]


def _section_above(source: Source, line: int) -> str:
    """The nearest ``# ---- title ----`` comment above a line."""
    sections = [n for n, c in source.own_line.items() if n < line and c.startswith("# ----")]
    return source.own_line[max(sections)] if sections else ""


def formatted(text: str) -> str:
    """``text`` in the project's format.

    Raises:
        SpecialiseError: ruff is missing or refuses the text.
    """
    beside = Path(sys.executable).with_name("ruff")
    ruff = str(beside) if beside.exists() else shutil.which("ruff")
    if ruff is None:
        raise SpecialiseError("generated code is formatted by ruff, which is not installed")
    options = ["--isolated", "--line-length", str(LINE_LENGTH), "--target-version", "py311"]
    done = subprocess.run([ruff, "format", *options, "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpecialiseError(f"ruff refuses the generated code: {done.stderr.strip()}")
    return done.stdout
