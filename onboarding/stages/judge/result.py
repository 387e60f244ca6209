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
    block_map_of: str = ""
    """The tensor with the largest share of its tolerance."""
    block_map: list[list[float]] = Field(default_factory=list)
    """RMS error of blocks of it (leading dims x last dim), as shares of its limit."""
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
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds by what they went into."""
    modes: dict[str, bool] = Field(default_factory=dict)
    """Subsets of gradients, two calls alive, recomputed, ``torch.compile``: whether each gave the same results."""
    operators: dict[str, int] = Field(default_factory=dict)
    """torch's operators on floating tensors in the host code, forward and backward, counted."""
    told: dict[str, int] = Field(default_factory=dict)
    """By output or gradient: cases that would have refused a worthless result."""
    void_cases: int = 0
    """Cases that could not tell a worthless result; the candidate was not tried with them, others took their place."""
    determinism: str = ""
    """``bitwise`` (checked), or ``atomic`` as the candidate declares."""
    numbers_beyond: list[int] = Field(default_factory=list)
    """Numbers in the source that are larger than any size that was tried."""
    not_run: list[str] = Field(default_factory=list)
    """Checks that need what this machine has not, each with the reason."""
    spec_digest: str = ""
    judge_version: str = ""
    """Digest of the code that the verdict rests on."""
    software: dict[str, str] = Field(default_factory=dict)
    """Versions, by name."""
    seconds: float = 0.0
    next_move: str = ""
    """After a refusal: ``repair`` (a new candidate is made) or ``give_up`` (torch keeps serving the operator)."""
    document: ArtifactRef | None = None
