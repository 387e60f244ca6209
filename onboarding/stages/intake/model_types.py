"""What the installed transformers knows, read from its sources with ``ast``: nothing of it is imported.

Importing transformers takes seconds and pulls in torch; the API only needs the list of model types and, for the one
that was submitted, the fields of its configuration class with their annotations.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from onboarding import syntax


@dataclass(frozen=True, kw_only=True)
class ConfigClass:
    """One configuration class as its source declares it."""

    name: str
    annotations: dict[str, str] = field(default_factory=dict)
    """Field -> annotation source, e.g. ``int | None``."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Field -> default, where it is written as a constant."""
    aliases: dict[str, str] = field(default_factory=dict)
    """``attribute_map``: common name -> the name that this class stores."""
    derived: frozenset[str] = frozenset()
    """Properties: never required from a user."""


@cache
def _package() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _string_pairs(tree: ast.AST) -> dict[str, dict[str, str]]:
    """Module-level ``NAME = OrderedDict([("key", "value"), ...])`` and ``NAME.update({...})`` as dicts."""
    tables: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            unpacked = [keyword.value for keyword in node.value.keywords if keyword.arg is None]
            name, values = node.targets[0].id, [*node.value.args, *unpacked]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "update"
            and isinstance(node.func.value, ast.Name)
        ):
            name, values = node.func.value.id, node.args
        else:
            continue
        for value in values:
            try:
                pairs = dict(ast.literal_eval(value))
            except (ValueError, TypeError):
                continue
            if all(isinstance(k, str) and isinstance(v, str) for k, v in pairs.items()):
                tables.setdefault(name, {}).update(pairs)
    return tables


@cache
def _tables() -> dict[str, dict[str, str]]:
    package = _package()
    merged: dict[str, dict[str, str]] = {}
    if package is None:
        return merged
    for name in ("auto_mappings.py", "configuration_auto.py"):
        path = package / "models" / "auto" / name
        if path.is_file():
            for table, pairs in _string_pairs(syntax.parse(path.read_text(encoding="utf-8"), str(path))).items():
                merged.setdefault(table, {}).update(pairs)
    return merged


def known_model_types() -> dict[str, str]:
    """Model type -> name of its configuration class."""
    return dict(_tables().get("CONFIG_MAPPING_NAMES", {}))


@cache
def known_classes() -> frozenset[str]:
    """Names of all model classes in transformers' tables, whatever their task."""
    path = (_package() or Path()) / "models" / "auto" / "modeling_auto.py"
    if not path.is_file():
        return frozenset()
    names: set[str] = set()
    for node in syntax.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_MAPPING_NAMES"):
            found = (leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant))
            names.update(value for value in found if isinstance(value, str) and value[:1].isupper())
    return frozenset(names)


@cache
def known_activations() -> frozenset[str]:
    """Names that a configuration may give as its activation function."""
    path = (_package() or Path()) / "activations.py"
    if not path.is_file():
        return frozenset()
    for node in syntax.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ACT2CLS":
            keys = getattr(node.value, "keys", [])
            return frozenset(k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
    return frozenset()


def nearest_model_types(model_type: str, count: int = 3) -> list[str]:
    """Known names that look like this one, best first."""
    normal = {name.lower().replace("-", "_"): name for name in known_model_types()}
    found = difflib.get_close_matches(model_type.lower().replace("-", "_"), list(normal), n=count, cutoff=0.6)
    return [normal[name] for name in found]


def _class_of(node: ast.ClassDef) -> ConfigClass:
    annotations: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    derived: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotations[statement.target.id] = ast.unparse(statement.annotation)
            defaults.pop(statement.target.id, None)
            if isinstance(statement.value, ast.Constant):
                defaults[statement.target.id] = statement.value.value
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if statement.targets[0].id == "attribute_map":
                aliases = dict(ast.literal_eval(statement.value))
        elif isinstance(statement, ast.FunctionDef) and any(
            isinstance(d, ast.Name) and d.id == "property" for d in statement.decorator_list
        ):
            derived.add(statement.name)
    return ConfigClass(
        name=node.name, annotations=annotations, defaults=defaults, aliases=aliases, derived=frozenset(derived)
    )


@cache
def config_class(model_type: str) -> ConfigClass | None:
    """The declared fields of a model type's configuration, with those of the bases in the same file.

    None when the type is unknown or its source is not where the mapping says.
    """
    package, name = _package(), known_model_types().get(model_type)
    if package is None or name is None:
        return None
    folder = _tables().get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", {}).get(model_type, model_type.replace("-", "_"))
    for path in sorted((package / "models" / folder).glob("configuration_*.py")):
        nodes = {
            n.name: n
            for n in syntax.parse(path.read_text(encoding="utf-8"), str(path)).body
            if isinstance(n, ast.ClassDef)
        }
        if name not in nodes:
            continue
        chain = [nodes[name]]
        while base := next((b.id for b in chain[-1].bases if isinstance(b, ast.Name) and b.id in nodes), None):
            chain.append(nodes[base])
        classes = [_class_of(node) for node in reversed(chain)]
        return ConfigClass(
            name=name,
            annotations={k: v for c in classes for k, v in c.annotations.items()},
            defaults={k: v for c in classes for k, v in c.defaults.items()},
            aliases={k: v for c in classes for k, v in c.aliases.items()},
            derived=frozenset().union(*(c.derived for c in classes)),
        )
    return None
