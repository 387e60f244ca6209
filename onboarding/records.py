"""Database tables. The database is the truth about jobs; a broker message is only a hint. Free of torch.

One writer a row: the supervisor that holds a step's lease writes the step; events are numbered in the transaction
that locks the job row, so that ``(job_id, seq)`` has no gaps and no late arrivals.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Column, DateTime, Index, UniqueConstraint
from sqlmodel import Field, SQLModel

JOB_STATES = ("queued", "running", "succeeded", "failed", "cancelled")
STEP_STATES = ("ready", "running", "succeeded", "skipped", "failed", "cancelled")
FINAL_STEP_STATES = frozenset({"succeeded", "skipped", "failed", "cancelled"})
FINAL_JOB_STATES = frozenset({"succeeded", "failed", "cancelled"})


def utcnow() -> datetime:
    """The current time, timezone aware."""
    return datetime.now(UTC)


def timestamp(*, nullable: bool = False, index: bool = False) -> Any:
    """A timezone-aware timestamp column."""
    return Field(
        default=None if nullable else None,
        sa_column=Column(DateTime(timezone=True), nullable=nullable, index=index),
    )


class Job(SQLModel, table=True):
    """A submitted model definition on its way to a bundle."""

    id: str = Field(primary_key=True)  # ULID: sorts by creation time
    name: str
    model_type: str
    owner: str = Field(index=True)  # id of the API key that submitted it
    state: str = Field(default="queued", index=True)
    definition: str  # digest of the definition artifact
    options: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
    problem: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    cancel_requested: bool = False
    last_seq: int = 0
    created_at: datetime = timestamp()
    started_at: datetime | None = timestamp(nullable=True)
    finished_at: datetime | None = timestamp(nullable=True)


class Step(SQLModel, table=True):
    """One attempt of one stage (and operator) of a job."""

    __table_args__ = (
        UniqueConstraint("job_id", "stage", "key", "attempt"),
        Index("ix_step_state_lease", "state", "lease_until"),
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", index=True)
    stage: str
    key: str = ""
    attempt: int = 1
    state: str = "ready"
    queue: str = "cpu"
    lease_owner: str | None = None
    lease_until: datetime | None = timestamp(nullable=True)
    takeovers: int = 0
    """How often an expired lease was taken over; past a limit the step fails instead of looping."""
    input: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    """Extra input from an edge back (for example operators to drop)."""
    result: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    problem: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    created_at: datetime = timestamp()
    started_at: datetime | None = timestamp(nullable=True)
    finished_at: datetime | None = timestamp(nullable=True)


class Event(SQLModel, table=True):
    """Something that happened in a job, numbered without gaps."""

    job_id: str = Field(primary_key=True, foreign_key="job.id")
    seq: int = Field(primary_key=True)
    kind: str  # job | step | progress | metric | artifact
    stage: str = ""
    key: str = ""
    at: datetime = timestamp()
    data: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


class Artifact(SQLModel, table=True):
    """A stored artifact as seen from a job."""

    __table_args__ = (UniqueConstraint("job_id", "stage", "key", "name", "digest"),)

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", index=True)
    stage: str
    key: str = ""
    name: str
    digest: str = Field(index=True)
    size: int
    media_type: str
    created_at: datetime = timestamp()


class ApiKey(SQLModel, table=True):
    """A bearer key; only its sha256 is stored."""

    id: str = Field(primary_key=True)
    name: str
    digest: str = Field(unique=True)
    created_at: datetime = timestamp()
    expires_at: datetime | None = timestamp(nullable=True)


class SignIn(SQLModel, table=True):
    """A one-time sign-in link or a browser session; only hashes are stored."""

    digest: str = Field(primary_key=True)
    kind: str  # link | session
    owner: str
    expires_at: datetime = timestamp()
    used: bool = False


class Idempotency(SQLModel, table=True):
    """The stored answer to a POST that carried an Idempotency-Key."""

    owner: str = Field(primary_key=True)
    route: str = Field(primary_key=True)
    idempotency_key: str = Field(primary_key=True)
    body_digest: str
    status: int | None = None
    response: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON))
    created_at: datetime = timestamp()
