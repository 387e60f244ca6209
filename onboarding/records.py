"""Database tables. The database is the truth about jobs; a broker message is only a hint. Free of torch.

One writer a row: the supervisor that holds a step's lease writes the step; events are numbered in the transaction
that locks the job row, so that ``(job_id, seq)`` has no gaps and no late arrivals.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Column, DateTime, Dialect, Index, TypeDecorator, UniqueConstraint
from sqlmodel import Field, SQLModel

# Every constraint has a name, so that a later migration can drop or change it on any database.
SQLModel.metadata.naming_convention = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def utcnow() -> datetime:
    """The current time, timezone aware."""
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware timestamp on every database: SQLite drops the zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Store UTC; a naive time is a mistake of the caller."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("timestamps must carry a timezone")
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Give the time back in UTC."""
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def timestamp() -> Any:
    """A column that holds the row's creation time."""
    return Field(default_factory=utcnow, sa_column=Column(UtcDateTime, nullable=False))


def moment() -> Any:
    """A column for a time that may not have come yet."""
    return Field(default=None, sa_column=Column(UtcDateTime, nullable=True))


def json_column(*, nullable: bool = False) -> Any:
    """A JSON object."""
    if nullable:
        return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=True))
    return Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class Job(SQLModel, table=True):
    """A submitted model definition on its way to a bundle."""

    id: str = Field(primary_key=True)  # ULID: sorts by creation time
    name: str = Field(index=True)
    model_type: str
    owner: str = Field(index=True)  # id of the API key that submitted it
    state: str = Field(default="queued", index=True)
    definition: str  # digest of the definition artifact
    options: dict[str, Any] = json_column()
    problem: dict[str, Any] | None = json_column(nullable=True)
    cancel_requested: bool = False
    last_seq: int = 0
    created_at: datetime = timestamp()
    started_at: datetime | None = moment()
    finished_at: datetime | None = moment()


class Step(SQLModel, table=True):
    """One attempt of one stage (and operator) of a job."""

    __table_args__ = (
        UniqueConstraint("job_id", "stage", "key", "attempt"),
        Index("ix_step_state_lease_until", "state", "lease_until"),
    )

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", index=True)
    stage: str
    key: str = ""
    attempt: int = 1
    state: str = "ready"
    queue: str = "cpu"
    lease_owner: str | None = None
    lease_until: datetime | None = moment()
    takeovers: int = 0
    """How often a dead run of this attempt was taken over; past a limit the step fails instead of looping."""
    input: dict[str, Any] = json_column()
    """Extra input from an edge back (for example operators to drop)."""
    result: dict[str, Any] | None = json_column(nullable=True)
    problem: dict[str, Any] | None = json_column(nullable=True)
    created_at: datetime = timestamp()
    started_at: datetime | None = moment()
    finished_at: datetime | None = moment()


class Event(SQLModel, table=True):
    """Something that happened in a job, numbered without gaps."""

    job_id: str = Field(primary_key=True, foreign_key="job.id")
    seq: int = Field(primary_key=True)
    kind: str  # job | step | progress | metric | artifact
    stage: str = ""
    key: str = ""
    at: datetime = timestamp()
    data: dict[str, Any] = json_column()


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


class LedgerEntry(SQLModel, table=True):
    """One thing that the agents of a job spent: a call of the language model, or GPU-seconds of a stage."""

    __table_args__ = (UniqueConstraint("job_id", "call"),)

    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", index=True)
    project: str = Field(index=True)
    stage: str
    key: str = ""
    attempt: int = 1
    role: str  # architect | author | repairer | analyst | reporter | judge | tune
    call: str  # what was asked, as a digest: the same question is never paid for twice
    state: str  # reserved | answered | failed | lost
    model: str = ""
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    money: float = 0.0
    """USD; of a reservation the most that the call may cost."""
    gpu_s: float = 0.0
    wall_s: float = 0.0
    request: dict[str, Any] | None = json_column(nullable=True)
    answer: dict[str, Any] | None = json_column(nullable=True)
    note: str = ""
    created_at: datetime = timestamp()
    finished_at: datetime | None = moment()


class Lesson(SQLModel, table=True):
    """What a search learnt about a family of operators: a failure and what ended it. Data, never instruction."""

    __table_args__ = (UniqueConstraint("project", "family", "digest"),)

    id: int | None = Field(default=None, primary_key=True)
    project: str = Field(index=True)
    family: str
    digest: str
    text: str
    created_at: datetime = timestamp()


class ApiKey(SQLModel, table=True):
    """A bearer key; only its sha256 is stored."""

    id: str = Field(primary_key=True)
    name: str
    digest: str = Field(unique=True)
    created_at: datetime = timestamp()
    expires_at: datetime | None = moment()


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
    response: dict[str, Any] | None = json_column(nullable=True)
    created_at: datetime = timestamp()
