"""One test case of an operator: what a family's ``cases`` returns and its ``make_tensors`` turns into inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and input distribution; the values themselves come from the judge's generator."""

    name: str
    """Readable and unique among a spec's cases, e.g. ``rows 7, hidden 100, tiny``."""
    dims: dict[str, int]
    """Every size that ``make_tensors`` needs."""
    dtype: str = "bfloat16"
    """Storage dtype of the activations."""
    distribution: str = "normal"
    """``normal``, ``tiny``, ``large``, ``constant`` or a name that the family knows."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the family needs to know, e.g. which optional inputs are there."""
