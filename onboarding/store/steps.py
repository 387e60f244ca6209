"""Steps: claimed, kept alive, finished, and taken over when their runner dies."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from onboarding.pipeline import FINAL_JOB_STATES
from onboarding.problem import Problem
from onboarding.records import Step
from onboarding.store.base import JOB, STEP, NewEvent
from onboarding.store.jobs import JobStore

MAX_TAKEOVERS = 3
"""A step that dies more often than this fails instead of looping."""


@dataclass(frozen=True)
class Beat:
    """What a heartbeat learns."""

    held: bool
    """The lease is still ours; if not, stop the work and write nothing."""
    cancel: bool
    """The job's cancellation was requested."""


class StepStore(JobStore):
    """Who runs what. A step's row is written only by the holder of its lease, checked in each UPDATE."""

    def get_step(self, step_id: int) -> Step | None:
        """A step."""
        with self.reading() as session:
            return session.get(Step, step_id)

    def ready_steps(self, queues: Collection[str] | None = None, *, older_than_s: float = 0.0) -> list[Step]:
        """Steps that wait for a runner: the oldest job first, in it the oldest step.

        Args:
            queues: only of these queues.
            older_than_s: only those made at least so long ago (younger ones have a hint on its way).
        """
        with self.reading() as session:
            until = self.now(session) - timedelta(seconds=older_than_s)
            query = (
                select(Step)
                .where(STEP.c.state == "ready", STEP.c.created_at <= until)
                .order_by(STEP.c.job_id, STEP.c.id)
            )
            if queues is not None:
                query = query.where(STEP.c.queue.in_(list(queues)))
            return list(session.scalars(query))

    def claim_step(self, step_id: int, owner: str, lease_s: float) -> Step | None:
        """Take a ready step; of several that try, exactly one gets it.

        Args:
            step_id: the step.
            owner: unique name of the runner that will hold the lease.
            lease_s: seconds until others may take the step over, unless :meth:`heartbeat` extends them.

        Returns:
            The step as claimed, or None: someone else has it, or its job has ended.
        """
        with self.writing() as session:
            job_id = session.execute(select(STEP.c.job_id).where(STEP.c.id == step_id)).scalar()
            job = self.lock_job(session, job_id) if job_id is not None else None
            if job is None or job.cancel_requested or job.state in FINAL_JOB_STATES:
                return None
            now = self.now(session)
            claimed = session.execute(
                update(STEP)
                .where(STEP.c.id == step_id, STEP.c.state == "ready")
                .values(
                    state="running",
                    lease_owner=owner,
                    lease_until=now + timedelta(seconds=lease_s),
                    started_at=func.coalesce(STEP.c.started_at, now),
                )
            )
            if claimed.rowcount != 1:  # type: ignore[attr-defined]  # the result of an UPDATE has it
                return None
            if job.state == "queued":
                session.execute(update(JOB).where(JOB.c.id == job.id).values(state="running", started_at=now))
                self.append(session, job.id, [NewEvent(kind="job", data={"state": "running"})])
            step = session.get_one(Step, step_id)
            self._tell(session, step, "running")
            return step

    def heartbeat(self, step_id: int, owner: str, lease_s: float) -> Beat:
        """Extend one's own lease, and learn whether to stop."""
        with self.writing() as session:
            until = self.now(session) + timedelta(seconds=lease_s)
            row = session.execute(
                update(STEP)
                .where(STEP.c.id == step_id, STEP.c.state == "running", STEP.c.lease_owner == owner)
                .values(lease_until=until)
                .returning(STEP.c.job_id)
            ).one_or_none()
            if row is None:
                return Beat(held=False, cancel=False)
            cancel = session.execute(select(JOB.c.cancel_requested).where(JOB.c.id == row.job_id)).scalar_one()
            return Beat(held=True, cancel=cancel)

    def cancel_requested(self, job_id: str) -> bool:
        """Whether the job's cancellation was requested."""
        with self.reading() as session:
            return bool(session.execute(select(JOB.c.cancel_requested).where(JOB.c.id == job_id)).scalar())

    def finish_step(
        self,
        step_id: int,
        owner: str,
        state: str,
        *,
        result: dict[str, Any] | None = None,
        problem: dict[str, Any] | None = None,
    ) -> list[Step] | None:
        """Record a step's end, add the next steps and end the job where the planner says so, all in one transaction.

        Args:
            step_id: the step.
            owner: the holder of its lease.
            state: ``succeeded``, ``skipped``, ``failed`` or ``cancelled``.
            result: what the stage returned; for ``skipped``, ``{"outcome": "skipped", "summary": reason}``.
            problem: problem+json members, for ``failed``.

        Returns:
            The steps it made ready (send a hint for each), or None: the lease was lost, nothing was written.
        """
        with self.writing() as session:
            return self._finish(session, step_id, owner, state, result, problem)

    def release_step(self, step_id: int, owner: str) -> list[Step] | None:
        """Give a step back unfinished because its runner is shutting down: ready again at once, as the same attempt.

        Returns:
            The steps it made ready; None: the lease was lost.
        """
        with self.writing() as session:
            step = self._own(session, step_id, owner)
            return None if step is None else self._make_ready(session, step, takeovers=step.takeovers)

    def step_died(self, step_id: int, owner: str, reason: str) -> list[Step] | None:
        """Record that a step's process died without a result: the same attempt is tried again, a few times.

        Returns:
            The steps it made ready; None: the lease was lost.
        """
        with self.writing() as session:
            step = self._own(session, step_id, owner)
            return None if step is None else self._take_over(session, step, reason)

    def take_over_expired(self) -> list[Step]:
        """Make steps ready again whose lease has run out (their runner died or hangs).

        Returns:
            The steps it made ready.
        """
        with self.reading() as session:
            expired = (STEP.c.state == "running") & (STEP.c.lease_until < self.now(session))
            found = session.execute(select(STEP.c.id, STEP.c.job_id).where(expired).order_by(STEP.c.id)).all()
        ready: list[Step] = []
        for step_id, job_id in found:
            with self.writing() as session:
                self.lock_job(session, job_id)
                still = (STEP.c.id == step_id) & (STEP.c.state == "running") & (STEP.c.lease_until < self.now(session))
                step = session.scalars(select(Step).where(still).with_for_update()).one_or_none()
                if step is not None:
                    ready += self._take_over(session, step, "its runner stopped reporting")
        return ready

    def load_result(self, job_id: str, stage: str, key: str = "") -> dict[str, Any] | None:
        """Stored result of the newest succeeded step of a stage (and operator), or None."""
        query = (
            select(STEP.c.result)
            .where(STEP.c.job_id == job_id, STEP.c.stage == stage, STEP.c.key == key, STEP.c.state == "succeeded")
            .order_by(STEP.c.id.desc())
            .limit(1)
        )
        with self.reading() as session:
            result: dict[str, Any] | None = session.execute(query).scalar()
            return result

    def earlier_results(self, job_id: str, stage: str, limit: int = 20) -> list[tuple[str, dict[str, Any]]]:
        """Job id and stored result of a stage in the owner's earlier jobs that succeeded on the same definition.

        Newest first.
        """
        this = select(JOB.c.owner, JOB.c.definition).where(JOB.c.id == job_id).subquery()
        query = (
            select(STEP.c.job_id, STEP.c.result)
            .join(JOB, JOB.c.id == STEP.c.job_id)
            .join(this, (this.c.owner == JOB.c.owner) & (this.c.definition == JOB.c.definition))
            .where(JOB.c.id < job_id, JOB.c.state == "succeeded", STEP.c.stage == stage, STEP.c.state == "succeeded")
            .order_by(STEP.c.job_id.desc(), STEP.c.id.desc())
            .limit(limit)
        )
        with self.reading() as session:
            return [(str(earlier), dict(result)) for earlier, result in session.execute(query) if result is not None]

    # What follows runs inside a transaction that holds the job's lock.

    def _own(self, session: Session, step_id: int, owner: str) -> Step | None:
        """Lock the step's job, then return the step if the owner still holds its lease."""
        job_id = session.execute(select(STEP.c.job_id).where(STEP.c.id == step_id)).scalar()
        if job_id is None:
            return None
        self.lock_job(session, job_id)
        held = (STEP.c.id == step_id) & (STEP.c.state == "running") & (STEP.c.lease_owner == owner)
        return session.scalars(select(Step).where(held).with_for_update()).one_or_none()

    def _finish(
        self,
        session: Session,
        step_id: int,
        owner: str | None,
        state: str,
        result: dict[str, Any] | None,
        problem: dict[str, Any] | None,
    ) -> list[Step] | None:
        job_id = session.execute(select(STEP.c.job_id).where(STEP.c.id == step_id)).scalar()
        if job_id is None:
            return None
        self.lock_job(session, job_id)
        done = session.execute(
            update(STEP)
            .where(STEP.c.id == step_id, STEP.c.state == "running", STEP.c.lease_owner == owner)
            .values(
                state=state,
                result=result,
                problem=problem,
                finished_at=self.now(session),
                lease_owner=None,
                lease_until=None,
            )
        )
        if done.rowcount != 1:  # type: ignore[attr-defined]  # the result of an UPDATE has it
            return None
        step = session.get_one(Step, step_id, populate_existing=True)
        self._tell(session, step, state)
        return self._advance(session, job_id)

    def _take_over(self, session: Session, step: Step, reason: str) -> list[Step]:
        job = self._job(session, step.job_id)
        assert step.id is not None
        if job.cancel_requested:
            return self._finish(session, step.id, step.lease_owner, "cancelled", None, None) or []
        if step.takeovers >= MAX_TAKEOVERS:
            problem = Problem(
                "step-keeps-dying",
                f"{step.stage} died {step.takeovers + 1} times",
                f"the last time: {reason}. Its log says more; `onboard retry` tries again.",
                status=500,
            )
            return self._finish(session, step.id, step.lease_owner, "failed", None, problem.to_dict()) or []
        return self._make_ready(session, step, takeovers=step.takeovers + 1, reason=reason)

    def _make_ready(self, session: Session, step: Step, *, takeovers: int, **data: Any) -> list[Step]:
        session.execute(
            update(STEP)
            .where(STEP.c.id == step.id, STEP.c.state == "running", STEP.c.lease_owner == step.lease_owner)
            .values(state="ready", lease_owner=None, lease_until=None, takeovers=takeovers)
        )
        session.refresh(step)
        self._tell(session, step, "ready", takeovers=takeovers, **data)
        # The job may have begun to end meanwhile: then the planner drops what is ready.
        self._advance(session, step.job_id)
        session.refresh(step)
        return [step] if step.state == "ready" else []

    def _tell(self, session: Session, step: Step, state: str, **data: Any) -> None:
        """Append the event of a step's new state."""
        told: dict[str, Any] = {"state": state, "attempt": step.attempt, **data}
        if step.result is not None:
            told |= {"outcome": step.result.get("outcome", "ok"), "summary": step.result.get("summary", "")}
        if step.problem is not None:
            told["problem"] = step.problem
        self.append(session, step.job_id, [NewEvent(kind="step", stage=step.stage, key=step.key, data=told)])
