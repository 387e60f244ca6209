"""What the API shows: public models, made from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from onboarding.overview import Progress, StageRow, stage_rows
from onboarding.records import Artifact, Event, Job, Step, utcnow


class StageView(StageRow):
    """One stage of a job: what the Gantt and the terminal show."""

    elapsed_s: float | None = None


class StepDetail(BaseModel):
    """The newest attempt of one step: of a whole stage, or of one operator in it."""

    key: str
    attempt: int
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    takeovers: int
    result: dict[str, Any] | None
    problem: dict[str, Any] | None


class JobView(BaseModel):
    """A job without its stages."""

    id: str
    name: str
    model_type: str
    state: str
    profile: str
    device: str
    definition: str
    options: dict[str, Any]
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    elapsed_s: float | None
    problem: dict[str, Any] | None
    links: dict[str, str]


class JobDetail(JobView):
    """A job with its stages."""

    stages: list[StageView]
    last_seq: int


class JobPage(BaseModel):
    """One page of jobs, newest first."""

    jobs: list[JobView]
    next: str | None = Field(description="pass as 'cursor' for the next page; null at the end")


class StageDetail(StageView):
    """A stage with the results of its steps."""

    results: list[StepDetail]


class ArtifactView(BaseModel):
    """A stored artifact of a job."""

    name: str
    stage: str
    key: str
    digest: str
    size: int
    media_type: str
    created_at: datetime
    href: str


class EventView(BaseModel):
    """One event, as the stream sends it."""

    seq: int
    kind: str
    stage: str
    key: str
    at: datetime
    data: dict[str, Any]


def elapsed(started: datetime | None, finished: datetime | None) -> float | None:
    """Seconds from start to finish, or to now."""
    return None if started is None else max(0.0, ((finished or utcnow()) - started).total_seconds())


def stage_views(steps: Sequence[Step], progress: Progress) -> list[StageView]:
    """One row for each stage of the pipeline, reached or not, with its time so far."""
    return [
        StageView(**row.model_dump(), elapsed_s=elapsed(row.started_at, row.finished_at))
        for row in stage_rows(steps, progress)
    ]


def newest_attempts(steps: Sequence[Step]) -> list[Step]:
    """The newest attempt of every (stage, key)."""
    return list({(step.stage, step.key): step for step in steps}.values())


def step_detail(step: Step) -> StepDetail:
    """One step with its result."""
    return StepDetail(**step.model_dump(include=set(StepDetail.model_fields)))


def job_links(job_id: str) -> dict[str, str]:
    """Where to go from a job."""
    base = f"/v1/jobs/{job_id}"
    return {"self": base, "events": f"{base}/events", "artifacts": f"{base}/artifacts", "page": f"/jobs/{job_id}"}


def _job_fields(job: Job) -> Mapping[str, Any]:
    return {
        **job.model_dump(exclude={"owner", "last_seq"}),
        "profile": str(job.options.get("profile", "standard")),
        "device": str(job.options.get("device", "auto")),
        "elapsed_s": elapsed(job.started_at, job.finished_at),
        "links": job_links(job.id),
    }


def job_view(job: Job) -> JobView:
    """A job for a list."""
    return JobView(**_job_fields(job))


def job_detail(job: Job, steps: Sequence[Step], progress: Progress) -> JobDetail:
    """A job with its stages."""
    return JobDetail(**_job_fields(job), stages=stage_views(steps, progress), last_seq=job.last_seq)


def artifact_view(row: Artifact) -> ArtifactView:
    """An artifact with its address under the job."""
    return ArtifactView(
        **row.model_dump(exclude={"id", "job_id"}), href=f"/v1/jobs/{row.job_id}/artifacts/{row.digest}"
    )


def event_view(event: Event) -> EventView:
    """An event for the stream."""
    return EventView(**event.model_dump(exclude={"job_id"}))
