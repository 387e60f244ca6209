"""What the throughput stage stores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onboarding.architecture import Record
from onboarding.context import StageResult
from onboarding.policy import Diagnosis
from onboarding.stages.gaps.result import Roofline


class Training(Record):
    """Some steps of one model under the runtime."""

    name: Literal["without the bundle", "with the bundle"]
    tokens_per_second: float
    """Median over the timed steps."""
    step_ms: float
    fastest_ms: float
    slowest_ms: float
    steps: int
    """That were timed; the ones before them warm up and do not count."""
    tflops: float
    """Model FLOPs (no recomputation) a second."""
    mfu: float | None = None
    """Share of the device's published peak; None where there is none to compare with."""
    peak_bytes: int
    """Of the device's allocator; on a CPU of the whole process, torch included."""
    first_loss: float
    last_loss: float
    kernels: int = 0
    """Module instances that ran on a kernel of the bundle."""


class LayerTime(Record):
    """Where one step's time goes: all blocks of one kind together, or what lies outside the blocks."""

    kind: str
    """``K: KDA, MoE 256 experts`` ..., ``embedding and input``, ``head and loss``, ``norm, clipping and optimizer``,
    and the remainder: ``between blocks``."""
    block: int | None = None
    """Which of the architecture's block kinds; None outside the blocks."""
    layers: int = 0
    forward_ms: float
    backward_ms: float
    """With recomputation, where blocks are recomputed."""
    share: float
    parts: dict[str, float] = Field(default_factory=dict)
    """Forward milliseconds by part of the block: ``mixer``, ``feed-forward``, ``norms``, ``other``."""


class RooflinePoint(Record):
    """One block kind under the device's two limits, forward pass, measured."""

    kind: str
    run: str
    intensity: float
    """FLOPs a byte of its operators' floors."""
    tflops: float
    """Reached."""
    share: float
    """Of what the roofline allows at this intensity."""


class Compared(Record):
    """One run beside the same run of an earlier job."""

    name: str
    speed: float
    """Tokens a second, this over that."""
    memory: float
    """Peak bytes, this over that."""
    allowed: float
    """Loss of speed that is no regression: the larger of 5 % and the spread of either run's steps."""
    regressed: str = ""
    """What is worse, in words; empty if nothing is."""


class Baseline(Record):
    """The newest earlier job of the same definition that measured the same thing on the same kind of device."""

    job_id: str
    runs: list[Compared]

    @property
    def regressed(self) -> str:
        """What is worse than it was, in words; empty if nothing is."""
        return "; ".join(f"{run.name}: {run.regressed}" for run in self.runs if run.regressed)


class LengthRow(Record):
    """One row of so many tokens, forward and backward."""

    tokens: int
    seconds: float
    bytes: int
    """On a CPU what backward reads, each storage once; on a GPU the allocator's peak, weights and all."""
    loss: float
    loss_error: float | None = None
    """Float32 against float64, relative; None on a GPU."""
    gradient_error: float | None = None
    """The same of all gradients together, by norm."""


class Lengths(Record):
    """How memory and error grow with the context."""

    rows: list[LengthRow]
    exponent: float | None = None
    """Memory grows with this power of the length (constants aside), by the last three lengths."""
    expected: float | None = None
    """The same by the traced model's law."""
    error_exponent: float | None = None
    """The gradients' error grows with this power of the length, from the shortest to the longest."""
    words: str
    """What that says."""


class ThroughputResult(StageResult):
    """``trained`` is ``twin`` (reduced twin) or ``slice`` (the published width, fewer layers)."""

    trained: Literal["twin", "slice"]
    words: str
    """What was trained, in words."""
    sizes: dict[str, int | str]
    device: str
    dtype: str
    adapters: bool
    """LoRA on a frozen base; else all parameters were trained."""
    batch: int
    sequence_length: int
    flops_per_token: float
    """Forward and backward of the model that was trained."""
    runs: list[Training]
    speedup: float | None = None
    """Tokens a second with the bundle over those without; None where both were not measured."""
    breakdown: list[LayerTime]
    breakdown_of: str
    """Name of the run that the breakdown is of."""
    breakdown_ms: float = 0.0
    """The step that was taken apart: its rows add up to this. It is one more step than those of ``runs``."""
    profile: str = ""
    """Of the job: how many steps were timed."""
    lengths: Lengths | None = None
    """None where longer rows were not tried; ``not_measured`` says why."""
    baseline: Baseline | None = None
    """None where no earlier job measured the same thing."""
    points: list[RooflinePoint] = Field(default_factory=list)
    roofline: Roofline | None = None
    diagnosis: Diagnosis | None = None
    """Where the step's time goes, and what could be done about it."""
    remedy: str = ""
    not_measured: list[str]
    """One sentence each, with the reason."""
    corpus: str
    seconds: float
