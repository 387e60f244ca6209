"""The template family nearest to a novel reference, by the words that both use."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from agents.roles.common import load_path
from kernel_templates.registry import FAMILIES

NEAR = 0.35
"""Cosine similarity from which a template is worth its tokens."""
LONGEST = 16_000
_WORD = re.compile(r"[A-Za-z_]{3,}")
_COMMON = {"tensors", "tensor", "torch", "spec", "def", "return", "self", "import", "for", "from", "none", "dtype"}


def nearest_template(spec: dict[str, Any]) -> tuple[str, str] | None:
    """Name and source of the nearest family's template; None for an operator of a family, or with none near."""
    source = spec.get("source")
    if not isinstance(source, str):
        return None
    mine = _words(source)
    scored = sorted(((_cosine(mine, words), family) for family, words in _families().items()), reverse=True)
    if not scored or scored[0][0] < NEAR:
        return None
    family = scored[0][1]
    return family, Path(load_path(family, "template")).read_text()[:LONGEST]


@cache
def _families() -> dict[str, Counter[str]]:
    found = {}
    for family in FAMILIES:
        path = Path(load_path(family, "reference"))
        if path.is_file():
            found[family] = _words(path.read_text())
    return found


def _words(source: str) -> Counter[str]:
    return Counter(w for w in (m.lower() for m in _WORD.findall(source)) if w not in _COMMON)


def _cosine(a: Counter[str], b: Counter[str]) -> float:
    size = math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))
    return sum(a[w] * b[w] for w in a.keys() & b.keys()) / size if size else 0.0
