"""The pipeline as data: stages, their queues, their order, the edges back, and what a user may choose. Free of torch.

A *step* is (job, stage, key, attempt); key is an operator spec digest in the stages that work per operator. What comes
next in a job is said by :func:`onboarding.planner.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from onboarding.architecture import Record
from onboarding.devices import DEVICES

Queue = Literal["cpu", "gpu", "multi"]
QUEUES: tuple[Queue, ...] = ("cpu", "gpu", "multi")
Device = Literal["auto", "cpu", "cuda"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
StepState = Literal["waiting", "ready", "running", "succeeded", "skipped", "failed", "cancelled"]
FINAL_JOB_STATES = frozenset({"succeeded", "failed", "cancelled"})
FINAL_STEP_STATES = frozenset({"succeeded", "skipped", "failed", "cancelled"})


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
    done_word: str = "done"
    """What one operator is after it, for summaries: ``7 generated``."""
    stops: frozenset[str] = frozenset({"skipped"})
    """Outcomes after which the next stage does not start. Per operator: torch keeps serving the operator and the job
    goes on. Else: the job fails."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An edge back: what happens after an outcome that is neither the way forward nor a stop."""

    stage: str
    outcome: str
    to: str
    """Stage that gets a new attempt, for the same key."""
    only_if: tuple[str, str] | None = None
    """(field, value) that the result must hold for the edge to count."""
    limit: int
    """How often the outcome may lead back, for one key."""
    collect: str = ""
    """Field of the result (a list) that is added to the next attempt's input; with nothing new in it going back would
    repeat the same attempt, so the edge is not taken."""
    into: str = ""
    """Field of the next attempt's input that holds everything collected so far."""
    keys: str = ""
    """Field of the result that lists the operators which get the new attempt; empty: the step's own key."""
    exhausted: str = ""
    """Title of the job's problem when the edge cannot be taken (again); empty: only this operator's path stops."""


STAGES: tuple[Stage, ...] = (
    Stage(name="intake", after="", verb="unpack, check and digest the definition"),
    Stage(name="parse", after="intake", verb="trace the model at its published size"),
    Stage(name="gaps", after="parse", verb="find operators without a fast provider"),
    Stage(
        name="generate",
        after="gaps",
        per_operator=True,
        verb="specialise kernels from templates",
        done_word="generated",
        stops=frozenset({"skipped", "refused", "gave_up"}),
    ),
    Stage(
        name="judge",
        after="generate",
        per_operator=True,
        uses_gpu=True,
        verb="prove each kernel numerically",
        done_word="accepted",
        stops=frozenset({"skipped", "refused"}),
    ),
    Stage(
        name="tune",
        after="judge",
        per_operator=True,
        uses_gpu=True,
        verb="search launch configurations",
        done_word="tuned",
        stops=frozenset(),
    ),
    Stage(
        name="align",
        after="tune",
        uses_gpu=True,
        verb="compare layers and loss curve with the reference",
        stops=frozenset(),
    ),
    Stage(
        name="throughput",
        after="align",
        uses_gpu=True,
        verb="train with and without the bundle, and time it",
        stops=frozenset(),
    ),
    Stage(
        name="scale",
        after="throughput",
        verb="budget, layout, dry run and projection for many devices",
        stops=frozenset(),
    ),
    Stage(name="package", after="scale", verb="write, sign and verify the bundle"),
)
STAGE_BY_NAME = {stage.name: stage for stage in STAGES}

EDGES: tuple[Edge, ...] = (
    # The diagnosis wants the guilty kernels written anew.
    Edge(
        stage="align",
        outcome="misaligned",
        only_if=("remedy", "repair"),
        to="generate",
        limit=1,
        collect="why",
        into="misaligned",
        keys="culprits",
        exhausted="the model does not align with its reference",
    ),
    Edge(
        stage="align",
        outcome="misaligned",
        to="align",
        limit=3,
        collect="culprits",
        into="dropped",
        exhausted="the model does not align with its reference",
    ),
    # The candidate was refused, and the policy wants another one.
    Edge(stage="judge", outcome="refused", only_if=("next_move", "repair"), to="generate", limit=3),
)


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
    nodes: int = Field(default=16, ge=1, le=1024)
    """Nodes that the scale stage plans for."""
    devices_per_node: int = Field(default=8, ge=1, le=72)
    """Devices that share one fast fabric."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    policy: Literal["auto", "rules", "llm"] = "auto"
    """Who chooses and writes candidates: ``auto`` asks the language model where one is configured."""
    project: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Whose budget the language model's calls are charged to, and whose lessons are used."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Tokens that the job's agents may spend; the service's own limit holds besides."""
    max_money: float | None = Field(default=None, ge=0)
    """USD, in the same way."""
    approve: list[Literal["generate", "package"]] = Field(default_factory=list)
    """Stages that wait for a person's approval before they start."""

    @field_validator("target")
    @classmethod
    def _known_target(cls, target: str) -> str:
        if target not in DEVICES:
            raise ValueError(f"no roofline for {target[:40]!r}; known: {', '.join(DEVICES)}")
        return target
