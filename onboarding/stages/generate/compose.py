"""A candidate out of written source: what the author wrote, and a header that only we write. Free of torch."""

from __future__ import annotations

import ast
from typing import Any

from kernel_templates.novel import NovelSpec
from kernel_templates.spec import OperatorSpec

CONTRACT = frozenset({"FAMILY", "SPEC_DIGEST", "SPEC", "INPUTS", "OUTPUTS"})
"""Names of a candidate that state its contract: an author's own are dropped."""
NOVEL_CONTRACT = CONTRACT | {"TRAITS", "SAVED_OUTPUTS", "bucket"}
HOSTS = ("outputs_like", "forward", "backward")


class ComposeError(ValueError):
    """The source cannot become a candidate; the message says why."""


def compose(body: str, spec: OperatorSpec) -> str:
    """The candidate's source: ``body`` without any contract of its own, then the contract of ``spec``.

    Raises:
        ComposeError: the body is not Python, or a host function is missing.
    """
    try:
        tree = ast.parse(body)
    except (SyntaxError, ValueError) as error:
        raise ComposeError(f"not valid Python: {error}") from error
    ours = NOVEL_CONTRACT if isinstance(spec, NovelSpec) else CONTRACT
    lines = body.splitlines()
    for node in reversed(tree.body):
        if _names(node) & ours:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            del lines[first - 1 : node.end_lineno]
    defined = {name for node in tree.body for name in _names(node)}
    missing = [name for name in HOSTS if name not in defined]
    if missing:
        raise ComposeError(f"it does not define {', '.join(missing)}")
    kept = constant(body, "SAVED_OUTPUTS") if isinstance(spec, NovelSpec) else None
    return "\n".join([*lines, "", "", *_contract(spec, kept), ""]).lstrip("\n")


def _contract(spec: OperatorSpec, kept: object) -> list[str]:
    """Our header; ``kept``: names of outputs that a novel candidate's backward reads, as its author states them."""

    def role(differentiable: bool, optional: bool) -> str:
        return " ".join(filter(None, ("differentiable" * differentiable, "optional" * optional)))

    inputs = {r.name: role(r.differentiable, r.optional) for r in spec.inputs()}
    outputs = {r.name: role(r.differentiable, r.optional) for r in spec.outputs()}
    stated = [f"FAMILY = {spec.family!r}", f"INPUTS = {inputs!r}", f"OUTPUTS = {outputs!r}"]
    if not isinstance(spec, NovelSpec):
        return [*stated, f"SPEC = {spec.to_dict()!r}"]
    digest = f"SPEC_DIGEST = {spec.digest()!r}"
    if isinstance(kept, list) and kept:
        unknown = [name for name in kept if not isinstance(name, str) or name not in outputs]
        if unknown:
            raise ComposeError(f"SAVED_OUTPUTS names {unknown[0]!r}, which is no output")
        stated.append(f"TRAITS = {{'saved_outputs': {kept!r}}}")
    return [*stated, digest, "", "", "def bucket(tensors):", "    return {}"]


def stated_tables(source: str) -> list[dict[str, Any]]:
    """Configuration tables out of what a novel candidate states.

    It states ``CONFIGS``, a list of configurations with the default first, and may state ``INTERPRETER``, the
    one for CPU tensors.

    Raises:
        ComposeError: it states none.
    """
    configs, interpreter = constant(source, "CONFIGS"), constant(source, "INTERPRETER")
    if not isinstance(configs, list) or not configs or not all(isinstance(c, dict) for c in configs):
        raise ComposeError("it declares no CONFIGS: a list of dicts of constants, the default first")
    chosen = {"interpreter": interpreter if isinstance(interpreter, dict) else configs[0], "nvidia_h200": configs[0]}
    return [{"device": device, "rows": [{"bucket": {}, "config": dict(c)}]} for device, c in chosen.items()]


def constant(source: str, name: str) -> object:
    """The value of a module-level constant, read without running it; None if there is none."""
    try:
        tree = ast.parse(source)
        found = [n for n in tree.body if isinstance(n, ast.Assign) and name in _names(n)]
        return ast.literal_eval(found[-1].value) if found else None
    except (SyntaxError, ValueError):
        return None


def kernels_in(source: str) -> list[str]:
    """Names of the functions under ``triton.jit``."""
    tree = ast.parse(source)
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.decorator_list]


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()
