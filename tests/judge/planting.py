"""Real candidates and small edits of their source that make them wrong."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import kernel_templates
from kernel_templates.registry import spec_class
from kernel_templates.spec import OperatorSpec
from onboarding.stages.generate.specialize import specialise
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.result import JudgeResult

TEMPLATES = Path(kernel_templates.__file__).parent

NORM: dict[str, Any] = {"hidden": 96, "offset": True, "gate": "sigmoid"}
PLAIN_NORM: dict[str, Any] = {"hidden": 96}
RESIDUAL_NORM: dict[str, Any] = {"hidden": 96, "residual": True}
MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 64, "intermediate": 32}
KDA: dict[str, Any] = {"key_heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 16}
SWIGLU: dict[str, Any] = {"width": 100}


def make_spec(family: str, flags: dict[str, Any]) -> OperatorSpec:
    return spec_class(family)(**flags)


def small_spec(family: str) -> OperatorSpec:
    """A spec of any family, with its default flags and small dims: for what must hold for every family."""
    kind = spec_class(family)
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    sizes: dict[str, Any] = {name: {"top_k": 2, "experts": 4}.get(name, 32) for name in needed}
    return kind(**sizes)


@functools.cache
def _source(spec: OperatorSpec) -> str:
    return specialise(TEMPLATES / spec.family / "template.py", spec).source


def candidate(spec: OperatorSpec, *edits: tuple[str, str]) -> bytes:
    """The candidate's source with every edit applied; an edit that finds nothing is an error in the test."""
    source = _source(spec)
    for old, new in edits:
        assert old in source, f"the {spec.family} candidate no longer contains {old!r}"
        source = source.replace(old, new)
    return source.encode()


def verdict(source: bytes, spec: OperatorSpec, folder: Path, **options: Any) -> JudgeResult:
    return judge(source, spec, folder=folder / "judge", **({"cases": 3, "seed": 7} | options))
