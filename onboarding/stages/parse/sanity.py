"""Limits for every part of a configuration, towers included: what lies beyond them is a mistake, not a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from onboarding.problem import Problem

MOST_LAYERS = 2_000
MOST_EXPERTS = 100_000
MOST = 2**40
DEEPEST = 32
_LAYERS = re.compile(r"(^|_)(num_hidden_layers|num_layers|n_layers?|depth|encoder_layers|decoder_layers|num_blocks)$")
_EXPERTS = re.compile(r"(^|_)(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")


def check_sizes(config: dict[str, Any]) -> None:
    """Refuse numbers that no model has, before anything is built from them.

    Raises:
        Problem: ``config-not-finite``, ``config-out-of-range`` or ``config-too-deep``, with the field.
    """
    for path, value in _numbers(config, "", 0):
        if isinstance(value, float) and not math.isfinite(value):
            raise Problem("config-not-finite", f"{path} is not a finite number", "remove or replace it", field=path)
        name = path.rpartition(".")[2]
        limit = MOST_LAYERS if _LAYERS.search(name) else MOST_EXPERTS if _EXPERTS.search(name) else MOST
        if abs(value) > limit:
            raise Problem(
                "config-out-of-range",
                f"{path} is {value if abs(value) < 10**30 else 'astronomical'}",
                f"at most {limit}",
                field=path,
                limit=limit,
            )


def _numbers(value: Any, path: str, depth: int) -> Iterator[tuple[str, int | float]]:
    if depth > DEEPEST:
        raise Problem(
            "config-too-deep", f"the configuration is nested deeper than {DEEPEST}", path[:200], field=path[:200]
        )
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, path, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
