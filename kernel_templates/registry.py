"""The template families, and how to read a spec back from JSON. Free of torch."""

from __future__ import annotations

import importlib
from typing import Any

from kernel_templates.novel import NOVEL, NovelSpec
from kernel_templates.spec import OperatorSpec

FAMILIES = (
    "norm",
    "gated_activation",
    "moe",
    "linear_attention",
    "short_convolution",
    "hyper_connection",
    "attention_residual",
    "linear_cross_entropy",
    "rotary",
    "routing",
    "indexer",
    "sparse_attention",
)


def spec_class(family: str) -> type[OperatorSpec]:
    """The spec class of a family.

    Raises:
        KeyError: if there is no such family.
    """
    if family == NOVEL:
        return NovelSpec
    if family not in FAMILIES:
        raise KeyError(f"unknown template family {family!r}; known: {', '.join(FAMILIES)}")
    module = importlib.import_module(f"kernel_templates.{family}.spec")
    cls: type[OperatorSpec] = module.Spec
    return cls


def load_spec(data: dict[str, Any]) -> OperatorSpec:
    """The spec that :meth:`OperatorSpec.to_dict` wrote.

    Raises:
        KeyError: unknown family.
        ValueError: a field has an impossible value.
        TypeError: a field is missing or unknown.
    """
    fields = dict(data)
    family = fields.pop("family")
    # tuples become lists in JSON
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return spec_class(family)(**fields)


_adapters: dict[str, Any] = {}


def add_adapter(family: str, adapter: Any) -> None:
    """Let ``adapter`` stand for the modules of a family that has no folder (novel operators)."""
    _adapters[family] = adapter


def family_module(family: str, part: str) -> Any:
    """A family's module: ``reference``, ``template``, ``cases``, ``tuning`` or ``op`` (these import torch)."""
    if family in _adapters:
        return _adapters[family]
    if family not in FAMILIES:
        raise KeyError(f"unknown template family {family!r}; known: {', '.join(FAMILIES)}")
    return importlib.import_module(f"kernel_templates.{family}.{part}")
