"""What the gap analysis stores."""

from __future__ import annotations

from typing import Any

from onboarding.architecture import Record
from onboarding.context import StageResult


class OperatorRow(Record):
    """One operator spec (or a group of plain torch operators) and who serves it."""

    digest: str
    """Operator spec digest; empty for operators that torch serves at full speed (linear, attention, embedding)."""
    name: str
    role: str
    family: str
    calls: int
    """In one forward pass."""
    flops: float
    """Forward and backward."""
    bytes_moved: float
    """Forward and backward: the floor for operator specs, what the traced operators move for the rest."""
    floor_ms: float
    """Forward and backward, roofline of the target device."""
    provider: str
    """Who would serve it today: ``torch linear``, ``torch sdpa``, ``transformers eager`` ..."""
    provider_ms: float
    """Estimate with that provider's measured or assumed efficiency; ``basis`` says which."""
    basis: str
    share_flops: float
    share_bytes: float
    share_time: float
    saving_ms: float = 0.0
    """What a kernel at a realistic share of the roofline would save in the step."""
    gap: bool
    """No fast provider: a kernel will be generated."""
    spec: dict[str, Any] | None = None


class GapsResult(StageResult):
    """All operators of the step, ranked by the time a kernel could save."""

    target: str
    sequence_length: int
    rows: list[OperatorRow]
    gaps: list[str]
    """Digests of the operator specs to generate, largest expected saving first."""
    step_ms: float
    """Sum of ``provider_ms``: a projection, not a measurement."""
    basis: str = ""
    """How ``step_ms`` was projected, in words."""
