"""The planner: from all steps of a job, which steps to add and whether the job has ended. Pure and free of torch.

It is called in the transaction that records a step's end, so the same history always gives the same next steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

from onboarding.pipeline import (
    EDGES,
    FINAL_JOB_STATES,
    FINAL_STEP_STATES,
    STAGE_BY_NAME,
    STAGES,
    Edge,
    Queue,
    Stage,
)
from onboarding.problem import Problem


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
    state: Literal["ready", "waiting"] = "ready"
    """``waiting``: nobody runs it until a person approves it."""


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


def plan(
    job_state: str,
    steps: Sequence[StepView],
    device: str,
    *,
    cancelling: bool = False,
    approve: Collection[str] = (),
) -> Plan:
    """Say which steps a job needs next and whether it has ended.

    Args:
        job_state: the job's state; a final state plans nothing.
        steps: all steps of the job, in the order in which they were made.
        device: the job's device option; ``cuda`` sends GPU stages to the ``gpu`` queue.
        cancelling: a user asked to cancel the job.
        approve: stages whose first attempt waits for a person's approval.
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

    history = _History(steps, device, approve)
    floor = -1
    for per_operator, group in groupby(STAGES, key=lambda stage: stage.per_operator):
        stages = tuple(group)
        keys = history.gaps() if per_operator else ("",)
        paths = [history.follow(stages, key, floor) for key in keys]
        for path in paths:
            if path.problem is not None:
                return Plan(job_outcome="failed", problem=path.problem, drop_ready=True)
        if not all(path.ended for path in paths):
            return Plan(new_steps=tuple(step for path in paths for step in path.new))
        floor = max((path.floor for path in paths), default=floor)
    return Plan(job_outcome="succeeded")


@dataclass(frozen=True, kw_only=True)
class _Path:
    """How far a chain of stages has come for one key."""

    floor: int
    """Position of its newest finished step: what comes after must be newer."""
    ended: bool = False
    new: tuple[NewStep, ...] = ()
    problem: dict[str, Any] | None = None


class _History:
    """A job's steps, with their order."""

    def __init__(self, steps: Sequence[StepView], device: str, approve: Collection[str] = ()) -> None:
        self.steps = steps
        self.approve = approve
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
                return _Path(floor=floor, new=(self.new_step(stage, key, {}),))
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
            keys = [str(key) for key in result.get(edge.keys, ())] if edge.keys else [step.key]
            stage = STAGE_BY_NAME[edge.to]
            return _Path(floor=floor, new=tuple(self.new_step(stage, key, carried) for key in keys))
        if not edge.exhausted:
            return _Path(floor=floor, ended=True)
        detail = str(result.get("summary", "")) or f"{edge.stage} ended as {edge.outcome} {taken} times"
        problem = Problem(edge.outcome, edge.exhausted, detail, stage=step.stage, key=step.key, attempt=step.attempt)
        return _Path(floor=floor, problem=problem.to_dict())

    def new_step(self, stage: Stage, key: str, carried: dict[str, Any]) -> NewStep:
        """The next attempt of a stage for a key."""
        attempts = [step.attempt for step in self.steps if step.stage == stage.name and step.key == key]
        queue: Queue = "gpu" if stage.uses_gpu and self.device == "cuda" else "cpu"
        return NewStep(
            stage=stage.name,
            key=key,
            attempt=max(attempts, default=0) + 1,
            queue=queue,
            input=carried,
            state="waiting" if stage.name in self.approve and not attempts else "ready",
        )


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
