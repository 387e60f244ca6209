"""The pipeline: stages, their queues, their order, and the edges back. Data and one pure function. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from onboarding.architecture import Record

Queue = Literal["cpu", "gpu", "multi"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline."""

    name: str
    after: str
    """The stage before it; empty for the first."""
    per_operator: bool = False
    """Runs once for each gap, side by side, each following its own operator."""
    uses_gpu: bool = False
    """Goes to the ``gpu`` queue when the job's device is cuda."""
    verb: str = ""
    """What it does, in a few words, for empty states."""


STAGES: tuple[Stage, ...] = (
    Stage(name="intake", after="", verb="unpack, check and digest the definition"),
    Stage(name="parse", after="intake", verb="trace the model at its published size"),
    Stage(name="gaps", after="parse", verb="find operators without a fast provider"),
    Stage(name="generate", after="gaps", per_operator=True, verb="specialise kernels from templates"),
    Stage(name="judge", after="generate", per_operator=True, uses_gpu=True, verb="prove each kernel numerically"),
    Stage(name="tune", after="judge", per_operator=True, uses_gpu=True, verb="search launch configurations"),
    Stage(name="align", after="tune", uses_gpu=True, verb="compare layers and loss curve with the reference"),
    Stage(name="package", after="align", verb="write, sign and verify the bundle"),
)
STAGE_BY_NAME = {stage.name: stage for stage in STAGES}


class Profile(Record):
    """How much a job does; results say which profile made them."""

    name: str
    twin_layers: int
    """Lower bound: the twin holds every block kind even if that needs more."""
    sequence_length: int
    """Tokens of the twin's sequences; at least four chunks."""
    chunk: int
    """Chunk length of linear attention on the interpreter."""
    train_steps: int
    judge_cases: int


PROFILES = {
    "quick": Profile(name="quick", twin_layers=2, sequence_length=64, chunk=16, train_steps=5, judge_cases=6),
    "standard": Profile(name="standard", twin_layers=4, sequence_length=72, chunk=16, train_steps=30, judge_cases=12),
}


class JobOptions(Record):
    """What a user may choose when submitting."""

    profile: Literal["quick", "standard"] = "standard"
    device: Device = "auto"
    """Where kernels are judged, tuned and aligned: ``auto`` takes a GPU where the worker has one."""
    target: str = "h200"
    """Device whose roofline ranks the gaps."""
    sequence_length: int = Field(default=8192, ge=1, le=2**21)
    """Tokens at which FLOPs, bytes and shares are counted."""
    seed: int = 0


def plan(steps: list[dict[str, Any]]) -> None:
    """Replaced by the real planner in this module's next commit."""
