"""What alignment stores."""

from __future__ import annotations

from pydantic import Field

from onboarding.architecture import Record
from onboarding.context import StageResult
from onboarding.policy import Diagnosis


class LayerError(Record):
    """Error of one layer's output, or of one parameter's gradient, candidate against reference."""

    name: str
    kind: str
    """``output`` or ``gradient``."""
    layer: int | None
    block: str
    p50: float
    p99: float
    maximum: float
    """Element errors relative to the tensor's RMS."""
    rms: float
    """Relative RMS error."""
    tolerance: float
    share: float


class Curves(Record):
    """Loss by optimizer step."""

    steps: list[int]
    reference: list[float]
    candidate: list[float]
    band: list[float]
    """Half-width of the band around the reference at each step."""
    band_basis: str
    """Where the band comes from, in words."""


class AlignResult(StageResult):
    """``outcome`` is ``ok`` or ``misaligned``."""

    twin: dict[str, int | str]
    """Sizes of the reduced twin."""
    twin_plan: str = ""
    """The twin's plan as JSON, for the stages that run the same twin; empty in results of older versions."""
    device: str
    dtype: str
    layers: list[LayerError]
    curves: Curves
    worst_share: float
    worst_where: str
    inside_band: bool
    p_value: float
    """Two-sided test of zero mean difference of the curves."""
    swapped: dict[str, int]
    """Operator spec digest -> module instances that ran on its kernel in the twin; all must be at least 1."""
    dropped: list[str] = Field(default_factory=list)
    """Digests left to torch: found guilty by an earlier bisection, or never called by the twin and so not proven."""
    culprits: list[str] = Field(default_factory=list)
    """For ``misaligned``: digests found guilty by bisection."""
    notes: list[str] = Field(default_factory=list)
    """What a reader should know: kernels that the twin never calls, tokens routed otherwise, calls not covered."""
    diagnosis: Diagnosis | None = None
    """Of a deviation; None where there is none."""
    remedy: str = ""
    """The diagnosis' action, where the pipeline's edges look: ``drop``, ``repair`` or ``report``."""
    why: list[str] = Field(default_factory=list)
    """What the author of a guilty kernel is told."""
    corpus: str
    seconds: float
