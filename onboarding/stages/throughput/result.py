"""What the throughput stage stores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onboarding.architecture import Record
from onboarding.context import StageResult
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
    points: list[RooflinePoint] = Field(default_factory=list)
    roofline: Roofline | None = None
    not_measured: list[str]
    """One sentence each, with the reason."""
    corpus: str
    seconds: float
