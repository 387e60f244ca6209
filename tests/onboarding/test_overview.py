"""Stage rows: what a user reads about a job, from the steps alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from onboarding.overview import StageRow, stage_rows
from onboarding.pipeline import STAGES

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Timed:
    """A step in memory; times are seconds after START."""

    stage: str
    key: str = ""
    state: str = "succeeded"
    start: float | None = None
    end: float | None = None
    attempt: int = 1
    input: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None

    @property
    def started_at(self) -> datetime | None:
        return None if self.start is None else START + timedelta(seconds=self.start)

    @property
    def finished_at(self) -> datetime | None:
        return None if self.end is None else START + timedelta(seconds=self.end)


def rows(steps: list[Timed], progress: dict[tuple[str, str], dict[str, Any]] | None = None) -> dict[str, StageRow]:
    return {row.stage: row for row in stage_rows(steps, progress)}


def gaps(*keys: str) -> Timed:
    return Timed("gaps", result={"outcome": "ok", "gaps": list(keys)})


def test_every_stage_has_a_row_from_the_first_second() -> None:
    found = stage_rows([])
    assert [row.stage for row in found] == [stage.name for stage in STAGES]
    assert {row.state for row in found} == {"waiting"}


def test_operators_are_summed_up() -> None:
    steps = [
        gaps("aa", "bb", "cc"),
        Timed("generate", "aa", start=1, end=3, result={"outcome": "ok"}),
        Timed("generate", "bb", start=2, end=5, result={"outcome": "ok"}),
        Timed("generate", "cc", start=5, end=6, result={"outcome": "gave_up"}),
        Timed("judge", "aa", start=4, end=9, result={"outcome": "accepted"}),
        Timed("judge", "bb", "running", start=9),
    ]
    found = rows(steps, {("judge", "bb"): {"done": 3, "total": 6, "label": "case 3"}})
    made = found["generate"]
    assert (made.state, made.done, made.total, made.summary) == ("succeeded", 3, 3, "2 generated, 1 gave_up")
    assert (made.started_at, made.finished_at) == (START + timedelta(seconds=1), START + timedelta(seconds=6))
    judge = found["judge"]
    assert (judge.state, judge.done, judge.total) == ("running", 1, 2), "what generate gave up is not expected here"
    assert judge.fraction == (1 + 3 / 6) / 2
    assert judge.label == "case 3"
    assert judge.finished_at is None
    assert found["tune"].state == "waiting"
    assert found["tune"].total == 2


def test_a_stage_with_nothing_to_work_on_is_skipped() -> None:
    assert {rows([gaps()])[stage].state for stage in ("generate", "judge", "tune")} == {"skipped"}
    refused = [gaps("aa"), Timed("generate", "aa"), Timed("judge", "aa", result={"outcome": "refused"})]
    found = rows(refused)
    assert (found["judge"].state, found["tune"].state) == ("succeeded", "skipped")


def test_one_reason_for_all_is_told_once() -> None:
    skipped = {"outcome": "skipped", "summary": "no GPU here"}
    steps = [gaps("aa", "bb")] + [Timed("tune", key, "skipped", result=skipped) for key in ("aa", "bb")]
    assert (rows(steps)["tune"].state, rows(steps)["tune"].summary) == ("skipped", "no GPU here")


def test_the_newest_attempt_counts() -> None:
    steps = [
        Timed("parse", state="failed", problem={"title": "no"}),
        Timed("parse", state="running", attempt=2, start=9),
    ]
    assert rows(steps[:1])["parse"].problem == {"title": "no"}
    row = rows(steps)["parse"]
    assert (row.state, row.attempt, row.problem) == ("running", 2, None)
