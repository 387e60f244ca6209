"""A job's stages as rows for people: steps of all operators and attempts, summed up. Free of torch and of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol

from onboarding.architecture import Record
from onboarding.pipeline import FINAL_STEP_STATES, STAGES, Stage, StepState
from onboarding.planner import StepView, outcome_of

Progress = Mapping[tuple[str, str], Mapping[str, Any]]
"""(stage, key) -> data of its newest progress event: ``done``, ``total``, ``label``."""


class TimedStep(StepView, Protocol):
    """A step with its times; :class:`onboarding.records.Step` has them."""

    @property
    def started_at(self) -> datetime | None: ...
    @property
    def finished_at(self) -> datetime | None: ...


class StageRow(Record):
    """One stage of a job."""

    stage: str
    verb: str
    per_operator: bool
    state: Literal["approval"] | StepState
    """``waiting``: not reached. ``approval``: it waits for a person. ``skipped`` also without operators to work on."""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempt: int = 0
    """The newest attempt; 0 while waiting."""
    done: int = 0
    total: int = 0
    """Operators finished, and to work on, in a per-operator stage; else 0 or 1."""
    summary: str = ""
    fraction: float | None = None
    """Share done, 0 to 1, while running and known."""
    label: str = ""
    """What is being worked on."""
    problem: dict[str, Any] | None = None


def stage_rows(steps: Sequence[TimedStep], progress: Progress | None = None) -> list[StageRow]:
    """One row for each stage of the pipeline, in order, whether reached or not.

    Args:
        steps: all steps of a job, in the order in which they were made (``Store.steps``).
        progress: newest progress by (stage, key) (``Store.latest_progress``).
    """
    newest = {(step.stage, step.key): step for step in steps}
    gaps = newest.get(("gaps", ""))
    operators: set[str] | None = None
    if gaps is not None and gaps.state == "succeeded":
        operators = set((gaps.result or {}).get("gaps", ()))
    rows = []
    for stage in STAGES:
        keys = {""} if not stage.per_operator else operators
        mine = [step for (name, _), step in newest.items() if name == stage.name]
        rows.append(_row(stage, mine, keys, progress or {}))
        if stage.per_operator and operators is not None:
            operators -= {step.key for step in mine if outcome_of(step) in stage.stops}
    return rows


def _row(stage: Stage, steps: Sequence[TimedStep], keys: set[str] | None, progress: Progress) -> StageRow:
    row = StageRow(stage=stage.name, verb=stage.verb, per_operator=stage.per_operator, state="waiting")
    row.total = len(keys) if keys is not None else 0
    if keys is not None and not keys:
        row.state, row.summary = "skipped", "no operators to work on"
    if not steps:
        return row
    row.done = sum(step.state in FINAL_STEP_STATES for step in steps)
    row.state = _state({step.state for step in steps}, complete=row.done >= row.total)
    row.attempt = max(step.attempt for step in steps)
    row.started_at = min((step.started_at for step in steps if step.started_at), default=None)
    if row.state in FINAL_STEP_STATES:
        row.finished_at = max((step.finished_at for step in steps if step.finished_at), default=None)
    row.summary = _summary(stage, steps)
    row.problem = next((dict(step.problem) for step in steps if step.problem), None)
    if row.state == "running":
        shares = {s.key: _share(progress.get((s.stage, s.key))) for s in steps if s.state == "running"}
        if stage.per_operator or any(share is not None for share in shares.values()):
            row.fraction = (row.done + sum(share or 0.0 for share in shares.values())) / max(row.total, 1)
        labels = (progress.get((stage.name, key), {}).get("label", "") for key in shares)
        row.label = next((str(label) for label in labels if label), "")
    return row


def _share(data: Mapping[str, Any] | None) -> float | None:
    if not data or not data.get("total"):
        return None
    return min(max(float(data["done"]) / float(data["total"]), 0.0), 1.0)


def _state(states: set[str], *, complete: bool) -> Literal["approval"] | StepState:
    if "running" in states:
        return "running"
    for final in ("failed", "cancelled"):
        if final in states:
            return final
    if "waiting" in states:
        return "approval"
    if "ready" in states:
        return "ready" if states == {"ready"} else "running"
    if not complete:
        return "running"
    return "skipped" if states == {"skipped"} else "succeeded"


def _summary(stage: Stage, steps: Sequence[TimedStep]) -> str:
    """The stage's own line; over several operators, counted outcomes, or the one reason that all share."""
    lines = {str((step.result or {}).get("summary", "")) for step in steps if step.result}
    if len(steps) == 1 or (len(lines) == 1 and all(step.state == "skipped" for step in steps)):
        return next(iter(lines), "")
    counts = Counter(outcome_of(step) for step in steps)
    words = {"ok": stage.done_word}
    return ", ".join(f"{n} {words.get(outcome, outcome)}" for outcome, n in counts.most_common() if outcome)
