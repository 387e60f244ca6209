"""Jobs: create, look up, cancel, retry, and carry out what the planner says."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session
from ulid import ULID

from onboarding.pipeline import FINAL_JOB_STATES, FINAL_STEP_STATES, JobOptions
from onboarding.planner import NewStep, plan
from onboarding.problem import Problem
from onboarding.records import Job, Step, utcnow
from onboarding.store.base import JOB, STEP, Database, NewEvent


@dataclass(frozen=True)
class JobPage:
    """Some jobs, newest first."""

    jobs: list[Job]
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; None on the last."""


class JobStore(Database):
    """Jobs and their transitions. Every method that changes a job takes its lock first."""

    def create_job(
        self, *, name: str, model_type: str, owner: str, definition: str, options: JobOptions | None = None
    ) -> Job:
        """Create a job with its first step ready.

        Args:
            name: shown name of the model.
            model_type: the config's ``model_type``.
            owner: id of the API key that submits.
            definition: digest of the stored definition artifact.
            options: what the user chose; defaults otherwise.
        """
        job_id = str(ULID())
        with self.writing() as session:
            session.execute(
                insert(JOB).values(
                    id=job_id,
                    name=name,
                    model_type=model_type,
                    owner=owner,
                    state="queued",
                    definition=definition,
                    options=(options or JobOptions()).model_dump(),
                    cancel_requested=False,
                    last_seq=0,
                    created_at=utcnow(),
                )
            )
            self.append(session, job_id, [NewEvent(kind="job", data={"state": "queued"})])
            self._advance(session, job_id)
            return self._job(session, job_id)

    def get_job(self, job_id: str, owner: str | None = None) -> Job | None:
        """A job; with ``owner``, only if it is that owner's."""
        query = select(Job).where(JOB.c.id == job_id)
        if owner is not None:
            query = query.where(JOB.c.owner == owner)
        with self.reading() as session:
            return session.scalars(query).one_or_none()

    def list_jobs(
        self,
        owner: str | None = None,
        *,
        cursor: str | None = None,
        limit: int = 50,
        state: str | None = None,
        name: str | None = None,
    ) -> JobPage:
        """Jobs, newest first (ids sort by creation time).

        Args:
            owner: only this owner's; None for all.
            cursor: ``next_cursor`` of the page before.
            limit: jobs on a page.
            state: only jobs in this state.
            name: only jobs whose name contains this, in any case.
        """
        query = select(Job).order_by(JOB.c.id.desc()).limit(limit + 1)
        if owner is not None:
            query = query.where(JOB.c.owner == owner)
        if cursor is not None:
            query = query.where(JOB.c.id < cursor)
        if state is not None:
            query = query.where(JOB.c.state == state)
        if name:
            query = query.where(JOB.c.name.icontains(name, autoescape=True))
        with self.reading() as session:
            jobs = list(session.scalars(query))
        more = len(jobs) > limit
        return JobPage(jobs[:limit], jobs[limit - 1].id if more else None)

    def steps(self, job_id: str) -> list[Step]:
        """All steps of a job, all attempts, in the order in which they were made."""
        with self.reading() as session:
            return self._steps(session, job_id)

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a job: ready steps at once, running ones as soon as their supervisor sees it.

        Idempotent; a job that has ended stays as it is.

        Raises:
            LookupError: no such job.
        """
        with self.writing() as session:
            job = self._locked(session, job_id)
            if job.cancel_requested or job.state in FINAL_JOB_STATES:
                return job
            session.execute(update(JOB).where(JOB.c.id == job_id).values(cancel_requested=True))
            self.append(session, job_id, [NewEvent(kind="job", data={"state": job.state, "cancel_requested": True})])
            self._advance(session, job_id)
            return self._job(session, job_id)

    def retry(self, job_id: str) -> Job:
        """Go on with a failed or cancelled job: new attempts of what failed or was cancelled; the rest is kept.

        Raises:
            LookupError: no such job.
            Problem: ``job-not-retryable`` (409): it has not failed and was not cancelled.
        """
        with self.writing() as session:
            job = self._locked(session, job_id)
            if job.state not in ("failed", "cancelled"):
                title = f"only a failed or cancelled job can be retried; this one is {job.state}"
                raise Problem("job-not-retryable", title, status=409, state=job.state)
            steps = self._steps(session, job_id)
            newest = {(step.stage, step.key): step for step in steps}
            again = [step for step in newest.values() if step.state in ("failed", "cancelled")]
            if not again and job.state == "failed" and job.problem:
                # It failed although every step finished: the step whose outcome it could not go on from is done anew.
                again = [newest[job.problem["stage"], job.problem["key"]]]
            session.execute(
                update(JOB)
                .where(JOB.c.id == job_id)
                .values(state="running", cancel_requested=False, problem=None, finished_at=None)
            )
            self.append(session, job_id, [NewEvent(kind="job", data={"state": "running", "retry": True})])
            for step in again:
                self._add(
                    session,
                    job_id,
                    NewStep(
                        stage=step.stage,
                        key=step.key,
                        attempt=step.attempt + 1,
                        queue=step.queue,  # type: ignore[arg-type]  # stored text of a Queue
                        input=dict(step.input),
                    ),
                )
            self._advance(session, job_id)
            return self._job(session, job_id)

    def decide(self, job_id: str, stage: str, key: str, *, approve: bool, by: str) -> Job:
        """Let a step that waits for approval run, or skip it: torch keeps serving its operator.

        Raises:
            LookupError: no such job.
            Problem: ``nothing-waits`` (409): no such step waits.
        """
        with self.writing() as session:
            self._locked(session, job_id)
            waiting = (STEP.c.job_id == job_id) & (STEP.c.stage == stage) & (STEP.c.key == key)
            now = self.now(session)
            declined = {"outcome": "skipped", "summary": f"declined by {by}"}
            values = {"state": "ready"} if approve else {"state": "skipped", "result": declined, "finished_at": now}
            done = session.execute(update(STEP).where(waiting, STEP.c.state == "waiting").values(**values))
            if done.rowcount != 1:  # type: ignore[attr-defined]  # the result of an UPDATE has it
                raise Problem("nothing-waits", f"no {stage} step waits for approval here", status=409)
            data = {"state": values["state"], "by": by}
            self.append(session, job_id, [NewEvent(kind="step", stage=stage, key=key, data=data)])
            self._advance(session, job_id)
            return self._job(session, job_id)

    def resubmit(self, job_id: str, key: str, candidate: str, *, parent: str, by: str) -> Job:
        """Have an operator's candidate that a person edited checked and judged like any other, and go on from there.

        Args:
            candidate: digest of the edited source's artifact.
            parent: digest of the candidate that it was made from.

        Raises:
            LookupError: no such job, or no such operator in it.
            Problem: ``job-busy`` (409): the operator, or a stage after it, is being worked on.
        """
        with self.writing() as session:
            job = self._locked(session, job_id)
            steps = self._steps(session, job_id)
            mine = [step for step in steps if step.stage == "generate" and step.key == key]
            if not mine:
                raise LookupError(f"no operator {key}")
            busy = [step for step in steps if step.state not in FINAL_STEP_STATES and step.key in ("", key)]
            if busy or job.cancel_requested:
                raise Problem("job-busy", "the job is working on this operator or on what follows", status=409)
            values = {"state": "running", "problem": None, "finished_at": None}
            session.execute(update(JOB).where(JOB.c.id == job_id).values(**values))
            data = {"state": "running", "resubmitted": key, "by": by}
            self.append(session, job_id, [NewEvent(kind="job", data=data)])
            carried = {"candidate": candidate, "parent": parent}
            attempt = max(step.attempt for step in mine) + 1
            self._add(session, job_id, NewStep(stage="generate", key=key, attempt=attempt, queue="cpu", input=carried))
            self._advance(session, job_id)
            return self._job(session, job_id)

    # What follows runs inside a transaction that holds the job's lock.

    def _locked(self, session: Session, job_id: str) -> Job:
        job = self.lock_job(session, job_id)
        if job is None:
            raise LookupError(f"no job {job_id}")
        return job

    @staticmethod
    def _job(session: Session, job_id: str) -> Job:
        query = select(Job).where(JOB.c.id == job_id).execution_options(populate_existing=True)
        return session.scalars(query).one()

    @staticmethod
    def _steps(session: Session, job_id: str) -> list[Step]:
        query = select(Step).where(STEP.c.job_id == job_id).order_by(STEP.c.id)
        return list(session.scalars(query.execution_options(populate_existing=True)))

    def _advance(self, session: Session, job_id: str) -> list[Step]:
        """Ask the planner, carry out its plan, and return the steps it added."""
        job = self._job(session, job_id)
        decision = plan(
            job.state,
            self._steps(session, job_id),
            job.options["device"],
            cancelling=job.cancel_requested,
            approve=job.options.get("approve", ()),
        )
        if decision.drop_ready:
            self._cancel_ready(session, job_id)
        added = [self._add(session, job_id, new) for new in decision.new_steps]
        if decision.job_outcome is not None:
            outcome = {"state": decision.job_outcome, "problem": decision.problem}
            session.execute(update(JOB).where(JOB.c.id == job_id).values(**outcome, finished_at=self.now(session)))
            self.append(session, job_id, [NewEvent(kind="job", data=outcome)])
        return added

    def _add(self, session: Session, job_id: str, new: NewStep) -> Step:
        step_id = session.execute(
            insert(STEP)
            .values(
                job_id=job_id,
                stage=new.stage,
                key=new.key,
                attempt=new.attempt,
                queue=new.queue,
                input=new.input,
                state=new.state,
                takeovers=0,
                created_at=self.now(session),
            )
            .returning(STEP.c.id)
        ).scalar_one()
        data = {"state": new.state, "attempt": new.attempt}
        self.append(session, job_id, [NewEvent(kind="step", stage=new.stage, key=new.key, data=data)])
        return session.get_one(Step, step_id)

    def _cancel_ready(self, session: Session, job_id: str) -> None:
        rows = session.execute(
            update(STEP)
            .where(STEP.c.job_id == job_id, STEP.c.state.in_(("ready", "waiting")))
            .values(state="cancelled", finished_at=self.now(session))
            .returning(STEP.c.stage, STEP.c.key, STEP.c.attempt)
        ).all()
        events = [
            NewEvent(kind="step", stage=stage, key=key, data={"state": "cancelled", "attempt": attempt})
            for stage, key, attempt in rows
        ]
        if events:
            self.append(session, job_id, events)
