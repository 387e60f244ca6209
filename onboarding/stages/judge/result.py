"""What the judge stores for one operator: the verdict."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from onboarding.architecture import Record
from onboarding.artifacts import ArtifactRef
from onboarding.context import StageResult


class TensorError(Record):
    """One output's or gradient's error in one case."""

    tensor: str
    """``o``, ``grad q`` ..."""
    error: float
    """Relative RMS error against the fp64 reference."""
    tolerance: float
    share: float
    """error / tolerance; over 1 fails."""
    reference_error: float
    """The family's rounded reference on the same input."""
    worst_index: list[int] = Field(default_factory=list)


class CaseReport(Record):
    """One case of the verdict."""

    name: str
    dims: dict[str, int]
    dtype: str
    distribution: str
    passed: bool
    reason: str = ""
    errors: list[TensorError] = Field(default_factory=list)
    checks: dict[str, bool] = Field(default_factory=dict)
    """Inputs unchanged, outputs fresh, second call independent, poisoned memory, strides ..."""
    sensitivity: dict[str, float] = Field(default_factory=dict)
    """Smallest share by which zeros, a constant, a sign flip and half the mantissa fail; all above 1."""
    seconds: float = 0.0


class JudgeResult(StageResult):
    """The verdict on a candidate. ``outcome`` is ``accepted`` or ``refused``."""

    spec: dict[str, Any]
    candidate: str
    """sha256 of the candidate's source."""
    level: Literal["interpreted", "compiled"]
    device: str
    triton: str
    torch: str
    seed: int
    """Drawn after the candidate was fixed."""
    cases: list[CaseReport]
    worst_share: float
    worst_where: str
    reasons: list[str] = Field(default_factory=list)
    """Why it was refused, most telling first."""
    sandbox: str
    next_move: str = ""
    """After a refusal: ``repair`` (a new candidate is made) or ``give_up`` (torch keeps serving the operator)."""
    document: ArtifactRef | None = None
