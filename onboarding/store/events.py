"""Events and artifacts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select

from onboarding.records import Artifact, Event
from onboarding.store.base import ARTIFACT, EVENT, Database, NewEvent


class EventStore(Database):
    """What happened, in order."""

    def append_events(self, job_id: str, events: Sequence[NewEvent]) -> int:
        """Store a batch of events; each gets the job's next number.

        Events of kind ``artifact`` (data: digest, name, size, media_type) are listed under the job as well.

        Returns:
            The last number given.

        Raises:
            LookupError: no such job.
        """
        with self.writing() as session:
            if self.lock_job(session, job_id) is None:
                raise LookupError(f"no job {job_id}")
            return self.append(session, job_id, events)

    def events_since(self, job_id: str, seq: int = 0, limit: int = 500) -> list[Event]:
        """Events numbered above ``seq``, oldest first, at most ``limit``. Numbers have no gaps."""
        query = select(Event).where(EVENT.c.job_id == job_id, EVENT.c.seq > seq).order_by(EVENT.c.seq).limit(limit)
        with self.reading() as session:
            return list(session.scalars(query))

    def latest_progress(self, job_id: str) -> dict[tuple[str, str], dict[str, Any]]:
        """(stage, key) -> data of its newest progress event: ``done``, ``total``, ``label``."""
        newest = (
            select(func.max(EVENT.c.seq))
            .where(EVENT.c.job_id == job_id, EVENT.c.kind == "progress")
            .group_by(EVENT.c.stage, EVENT.c.key)
        )
        query = select(EVENT.c.stage, EVENT.c.key, EVENT.c.data).where(
            EVENT.c.job_id == job_id, EVENT.c.seq.in_(newest)
        )
        with self.reading() as session:
            return {(stage, key): data for stage, key, data in session.execute(query)}

    def metrics(self, job_id: str, stage: str) -> list[Event]:
        """All points of a stage's live curves, oldest first (data: ``series``, ``step``, ``value``)."""
        query = (
            select(Event)
            .where(EVENT.c.job_id == job_id, EVENT.c.kind == "metric", EVENT.c.stage == stage)
            .order_by(EVENT.c.seq)
        )
        with self.reading() as session:
            return list(session.scalars(query))

    def artifacts(self, job_id: str) -> list[Artifact]:
        """The job's artifacts, in the order in which they were stored."""
        with self.reading() as session:
            return list(session.scalars(select(Artifact).where(ARTIFACT.c.job_id == job_id).order_by(ARTIFACT.c.id)))

    def artifact_of(self, job_id: str, digest: str) -> Artifact | None:
        """One of the job's artifacts: a digest is served only through a job that lists it."""
        query = select(Artifact).where(ARTIFACT.c.job_id == job_id, ARTIFACT.c.digest == digest)
        with self.reading() as session:
            return session.scalars(query.order_by(ARTIFACT.c.id)).first()
