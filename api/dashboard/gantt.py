"""The Gantt: where each step's bar starts and ends, in thousandths of the job's span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from api.views import StageView
from onboarding.records import Job, Step, utcnow

WIDTH = 1000.0
MINIMUM = 4.0
"""A bar is never thinner than this, so that a fast stage can be seen."""
LANES = 6
MIN_SPAN_S = 10.0


@dataclass(frozen=True)
class Bar:
    """One attempt of one step, on a canvas of 1000 by 100."""

    x: float
    width: float
    y: float
    height: float
    state: str
    old: bool
    title: str


@dataclass(frozen=True)
class Row:
    """A stage with its bars."""

    view: StageView
    bars: list[Bar]
    lanes: int


@dataclass(frozen=True)
class Gantt:
    """All rows and the time axis."""

    rows: list[Row]
    span_s: float
    ticks: list[tuple[float, float]]
    """(position in thousandths, seconds)"""


def tick_step(span_s: float) -> float:
    """A round distance between ticks that gives three to six of them."""
    for step in (2.0, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600):
        if span_s / step <= 6:
            return step
    return 86400.0


def gantt(job: Job, steps: Sequence[Step], views: Sequence[StageView], now: datetime | None = None) -> Gantt:
    """Lay out a job; complete with empty rows before anything has started."""
    now = now or utcnow()
    begin = job.started_at or job.created_at
    end = job.finished_at or now
    times = [moment for step in steps for moment in (step.started_at, step.finished_at) if moment]
    begin, end = min([begin, *times]), max([end, *times])
    span = max(MIN_SPAN_S, (end - begin).total_seconds())

    def position(moment: datetime) -> float:
        return WIDTH * (moment - begin).total_seconds() / span

    rows = []
    for view in views:
        mine = [step for step in steps if step.stage == view.stage]
        newest = {(step.key): step.attempt for step in sorted(mine, key=lambda step: step.attempt)}
        keys = list(newest)
        lanes = max(1, min(LANES, len(keys)))
        bars = []
        for step in mine:
            if step.started_at is None:
                continue
            x = position(step.started_at)
            width = max(MINIMUM, position(step.finished_at or now) - x)
            lane = keys.index(step.key) % lanes
            bars.append(
                Bar(
                    x=round(min(x, WIDTH - width), 1),
                    width=round(width, 1),
                    y=round(100 * lane / lanes, 1),
                    height=round(100 / lanes - (4 if lanes > 1 else 0), 1),
                    state=step.state,
                    old=step.attempt < newest[step.key],
                    title=f"{step.stage} {step.key[:8]} attempt {step.attempt}: {step.state}".replace("  ", " "),
                )
            )
        rows.append(Row(view, bars, lanes))
    step_s = tick_step(span)
    ticks = [(round(WIDTH * step_s * i / span, 1), step_s * i) for i in range(int(span / step_s) + 1)]
    return Gantt(rows, span, ticks)
