"""What the gap analysis stores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from onboarding.architecture import OperatorUse, Record
from onboarding.context import StageResult
from onboarding.novel.facts import Named


class OperatorRow(Record):
    """One operator spec (or a group of plain torch operators) and who serves it."""

    digest: str
    """Operator spec digest; empty for plain torch operators: most are served at full speed, the rest have no family."""
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
    gain: float = 0.0
    """The same as a share of the whole step's time."""
    intensity: float = 0.0
    """FLOPs a byte, forward and backward: where the operator stands on the roofline's horizontal axis."""
    bound: Literal["", "compute", "memory"] = ""
    """Which of the two floors is the longer one on the target; empty in results of older versions."""
    gap: bool
    """No fast provider: a kernel will be generated where there is a template family, that is a digest."""
    spec: dict[str, Any] | None = None


class Coverage(Record):
    """What one provider serves of the step."""

    provider: str
    operators: int
    """Rows: operator specs, or groups of plain operators."""
    share_time: float
    share_flops: float
    fast: bool
    """It reaches the share of the roofline at which nothing is generated, over all that it serves."""


class Roofline(Record):
    """The target device's two limits."""

    tflops: float
    bandwidth: float
    """TB/s."""
    basis: str

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which computing takes longer than moving."""
        return self.tflops / self.bandwidth


class GapsResult(StageResult):
    """All operators of the step, ranked by the time a kernel could save."""

    target: str
    sequence_length: int
    rows: list[OperatorRow]
    gaps: list[str]
    """Digests of the operator specs to generate, largest expected saving first."""
    step_ms: float
    """Sum of ``provider_ms``: a projection, not a measurement."""
    coverage: list[Coverage] = Field(default_factory=list)
    """By provider, largest share of the step first."""
    roofline: Roofline | None = None
    basis: str = ""
    """How ``step_ms`` was projected, in words."""
    novel: list[Named] = Field(default_factory=list)
    """What became of the modules that match nothing known."""
    uses: list[OperatorUse] = Field(default_factory=list)
    """Operators that were found in them and proven, beside the architecture's own."""
