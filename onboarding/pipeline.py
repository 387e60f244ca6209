"""The pipeline: stages, their queues, their order, and the edges back. Data and one pure function. Free of torch.

A *step* is (job, stage, key, attempt); key is an operator spec digest in the stages that work per operator.
:func:`plan` looks at all steps of a job and says which steps to add and whether the job has ended. It is called in the
transaction that records a step's end, so the same history always gives the same next steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

from pydantic import Field

from onboarding.architecture import Record
from onboarding.problem import Problem

Queue = Literal["cpu", "gpu", "multi"]
QUEUES: tuple[Queue, ...] = ("cpu", "gpu", "multi")
Device = Literal["auto", "cpu", "cuda"]
JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
StepState = Literal["ready", "running", "succeeded", "skipped", "failed", "cancelled"]
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
    Stage(name="package", after="align", verb="write, sign and verify the bundle"),
)
STAGE_BY_NAME = {stage.name: stage for stage in STAGES}

EDGES: tuple[Edge, ...] = (
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
    seed: int = 0


class StepView(Protocol):
    """What planning may know of a step; :class:`onboarding.records.Step` has it all."""

    @property
    def stage(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def input(self) -> Mapping[str, Any]: ...
    @property
    def result(self) -> Mapping[str, Any] | None: ...
    @property
    def problem(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class NewStep:
    """A step to add."""

    stage: str
    key: str
    attempt: int
    queue: Queue
    input: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do next with a job."""

    new_steps: tuple[NewStep, ...] = ()
    job_outcome: str | None = None
    """``succeeded``, ``failed`` or ``cancelled`` when the job has ended."""
    problem: dict[str, Any] | None = None
    """Why the job failed."""
    drop_ready: bool = False
    """The job is ending: cancel the steps that have not started. Running ones end by themselves."""


def plan(job_state: str, steps: Sequence[StepView], device: str, *, cancelling: bool = False) -> Plan:
    """Say which steps a job needs next and whether it has ended.

    Args:
        job_state: the job's state; a final state plans nothing.
        steps: all steps of the job, in the order in which they were made.
        device: the job's device option; ``cuda`` sends GPU stages to the ``gpu`` queue.
        cancelling: a user asked to cancel the job.
    """
    if job_state in FINAL_JOB_STATES:
        return Plan()
    newest = {(step.stage, step.key): step for step in steps}
    failed = next((step for step in newest.values() if step.state == "failed"), None)
    if cancelling or failed or any(step.state == "cancelled" for step in newest.values()):
        if any(step.state == "running" for step in steps):
            return Plan(drop_ready=True)
        if cancelling or failed is None:
            return Plan(job_outcome="cancelled", drop_ready=True)
        problem = {**(failed.problem or {}), "stage": failed.stage, "key": failed.key, "attempt": failed.attempt}
        return Plan(job_outcome="failed", problem=problem, drop_ready=True)

    history = _History(steps, device)
    floor = -1
    for per_operator, group in groupby(STAGES, key=lambda stage: stage.per_operator):
        stages = tuple(group)
        keys = history.gaps() if per_operator else ("",)
        paths = [history.follow(stages, key, floor) for key in keys]
        for path in paths:
            if path.problem is not None:
                return Plan(job_outcome="failed", problem=path.problem, drop_ready=True)
        if not all(path.ended for path in paths):
            return Plan(new_steps=tuple(path.new for path in paths if path.new is not None))
        floor = max((path.floor for path in paths), default=floor)
    return Plan(job_outcome="succeeded")


@dataclass(frozen=True, kw_only=True)
class _Path:
    """How far a chain of stages has come for one key."""

    floor: int
    """Position of its newest finished step: what comes after must be newer."""
    ended: bool = False
    new: NewStep | None = None
    problem: dict[str, Any] | None = None


class _History:
    """A job's steps, with their order."""

    def __init__(self, steps: Sequence[StepView], device: str) -> None:
        self.steps = steps
        self.device = device
        self.position = {(step.stage, step.key): index for index, step in enumerate(steps)}

    def gaps(self) -> tuple[str, ...]:
        """Digests of the operators to work on."""
        result = self.steps[self.position["gaps", ""]].result or {}
        return tuple(dict.fromkeys(result["gaps"]))

    def follow(self, stages: Sequence[Stage], key: str, floor: int) -> _Path:
        """Walk a chain of stages: a step counts only if it is newer than the step it builds on."""
        for stage in stages:
            position = self.position.get((stage.name, key), -1)
            if position <= floor:
                return _Path(floor=floor, new=self.new_step(stage, key, {}))
            step = self.steps[position]
            if step.state not in FINAL_STEP_STATES:
                return _Path(floor=floor)
            floor = position
            outcome = outcome_of(step)
            edge = edge_after(step)
            if edge is not None:
                return self.go_back(edge, step, floor)
            if outcome in stage.stops:
                if stage.per_operator:
                    return _Path(floor=floor, ended=True)
                return _Path(floor=floor, problem=_stopped(step, outcome))
        return _Path(floor=floor, ended=True)

    def go_back(self, edge: Edge, step: StepView, floor: int) -> _Path:
        """Take an edge back, or say that it is exhausted."""
        result = step.result or {}
        earlier = list(step.input.get(edge.into, ()))
        fresh = [item for item in result.get(edge.collect, ()) if item not in earlier]
        taken = sum(s.key == step.key and edge_after(s) is edge for s in self.steps)
        if taken <= edge.limit and (fresh or not edge.collect):
            carried = {edge.into: earlier + fresh} if edge.collect else {}
            return _Path(floor=floor, new=self.new_step(STAGE_BY_NAME[edge.to], step.key, carried))
        if not edge.exhausted:
            return _Path(floor=floor, ended=True)
        detail = str(result.get("summary", "")) or f"{edge.stage} ended as {edge.outcome} {taken} times"
        problem = Problem(edge.outcome, edge.exhausted, detail, stage=step.stage, key=step.key, attempt=step.attempt)
        return _Path(floor=floor, problem=problem.to_dict())

    def new_step(self, stage: Stage, key: str, carried: dict[str, Any]) -> NewStep:
        """The next attempt of a stage for a key."""
        attempts = [step.attempt for step in self.steps if step.stage == stage.name and step.key == key]
        queue: Queue = "gpu" if stage.uses_gpu and self.device == "cuda" else "cpu"
        return NewStep(stage=stage.name, key=key, attempt=max(attempts, default=0) + 1, queue=queue, input=carried)


def outcome_of(step: StepView) -> str:
    """What the pipeline's edges look at: ``skipped``, or the stored result's outcome; empty while unfinished."""
    if step.state == "skipped":
        return "skipped"
    return str((step.result or {}).get("outcome", "ok")) if step.state == "succeeded" else ""


def edge_after(step: StepView) -> Edge | None:
    """The edge back that a step's outcome asks for."""
    result = step.result or {}
    for edge in EDGES:
        if (edge.stage, edge.outcome) == (step.stage, outcome_of(step)) and (
            edge.only_if is None or result.get(edge.only_if[0]) == edge.only_if[1]
        ):
            return edge
    return None


def _stopped(step: StepView, outcome: str) -> dict[str, Any]:
    reason = str((step.result or {}).get("summary", ""))
    return Problem(
        "stage-without-result",
        f"{step.stage} ended as {outcome}, and nothing can be done without it",
        reason,
        stage=step.stage,
        key=step.key,
        attempt=step.attempt,
    ).to_dict()
