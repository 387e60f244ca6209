"""The ledger: what a job's agents spend, within hard limits, and what their searches learnt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlmodel import SQLModel

from onboarding.pipeline import FINAL_JOB_STATES
from onboarding.problem import Problem
from onboarding.records import LedgerEntry, Lesson, utcnow
from onboarding.store.base import Database

LEDGER = SQLModel.metadata.tables["ledgerentry"]
LESSON = SQLModel.metadata.tables["lesson"]

RATE_WINDOW_S = 60.0
LESSONS_KEPT = 200
"""Of one project and family; the oldest go first."""


@dataclass(frozen=True, kw_only=True)
class Purse:
    """An amount of everything that is limited."""

    tokens: int = 0
    money: float = 0.0
    """USD."""
    gpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BudgetLimits:
    """Hard limits; a limit of None does not bind."""

    job: Purse | None = None
    project: Purse | None = None
    operator: Purse | None = None
    """Of the step's key: its share of the job's budget."""
    role_tokens: dict[str, int] = field(default_factory=dict)
    """Of a job, by role."""
    requests_per_minute: int = 60


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is about to be paid for."""

    job_id: str
    project: str
    stage: str
    key: str
    attempt: int
    role: str
    call: str
    """Digest of the question."""
    model: str = ""
    most: Purse = field(default_factory=Purse)
    """The most that it may cost; reserved until it is settled."""
    request: dict[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """The answer to a reservation."""

    entry: LedgerEntry | None
    """The reservation, or what an earlier run of the step already paid for (then it has an answer)."""
    wait_s: float = 0.0
    """Without an entry: come again after so long, the rate limit is reached."""


class LedgerStore(Database):
    """Every amount is written before it is used, and every reservation is checked in the transaction that makes it."""

    def reserve(self, call: Call, limits: BudgetLimits) -> Turn:
        """Reserve the most that a call may cost, or find the answer that was paid for before.

        A reservation of the same call that was never settled belongs to a process that died: whether it was paid is
        unknown, so it stays charged, as lost.

        Raises:
            Problem: ``budget-spent`` (the limit in ``detail``), or ``job-cancelled``.
        """
        with self.writing() as session:
            job = self.lock_job(session, call.job_id)
            if job is None:
                raise LookupError(f"no job {call.job_id}")
            mine = (LEDGER.c.job_id == call.job_id) & (LEDGER.c.call == call.call)
            found = session.scalars(select(LedgerEntry).where(mine)).one_or_none()
            if found is not None and found.state == "answered":
                return Turn(found)
            if found is not None:
                state = "lost" if found.state == "reserved" else found.state
                values = {"call": f"{call.call}:{found.id}", "state": state}
                session.execute(update(LEDGER).where(LEDGER.c.id == found.id).values(**values))
            if job.cancel_requested or job.state in FINAL_JOB_STATES:
                raise Problem("job-cancelled", "the job was cancelled", "no further call is made", status=409)
            if not self.is_sqlite:  # jobs of one project check its budget one after the other
                name = int.from_bytes(hashlib.sha256(call.project.encode()).digest()[:7], "big")
                session.execute(text("SELECT pg_advisory_xact_lock(:name)"), {"name": name})
            self._check(session, call, limits)
            wait = self._wait(session, limits.requests_per_minute)
            if wait > 0:
                return Turn(None, wait)
            entry_id = session.execute(
                insert(LEDGER)
                .values(
                    **_identity(call)
                    | {"state": "reserved", "tokens_in": call.most.tokens, "money": call.most.money}
                    | {"request": call.request, "created_at": self.now(session)}
                )
                .returning(LEDGER.c.id)
            ).scalar_one()
            return Turn(session.get_one(LedgerEntry, entry_id))

    def settle(
        self,
        entry_id: int,
        answer: dict[str, Any],
        *,
        tokens_in: int,
        tokens_cached: int,
        tokens_out: int,
        money: float,
        wall_s: float,
        note: str = "",
    ) -> None:
        """Store an answer and what it cost in place of the reservation."""
        self._end(
            entry_id,
            state="answered",
            answer=answer,
            tokens_in=tokens_in,
            tokens_cached=tokens_cached,
            tokens_out=tokens_out,
            money=money,
            wall_s=wall_s,
            note=note,
        )

    def fail(self, entry_id: int, note: str, *, wall_s: float, paid: bool = False) -> None:
        """The call ended without an answer: nothing was paid, or (``paid``) as much as was reserved."""
        free = {} if paid else {"tokens_in": 0, "money": 0.0}
        self._end(entry_id, state="lost" if paid else "failed", note=note[:2000], wall_s=wall_s, **free)

    def charge(self, call: Call, *, gpu_s: float, wall_s: float, facts: dict[str, Any] | None = None) -> None:
        """Charge what a stage took; the same call is charged once however often it is told."""
        try:
            with self.writing() as session:
                now = self.now(session)
                session.execute(
                    insert(LEDGER).values(
                        **_identity(call)
                        | {"state": "answered", "gpu_s": gpu_s, "wall_s": wall_s, "answer": facts}
                        | {"created_at": now, "finished_at": now}
                    )
                )
        except IntegrityError:
            return

    def spent(self, *, job_id: str = "", project: str = "", role: str = "", key: str = "") -> Purse:
        """What was spent and is reserved, over the entries that match all that is given."""
        with self.reading() as session:
            return self._spent(session, _matching(job_id=job_id, project=project, role=role, key=key))

    def ledger(self, job_id: str) -> list[LedgerEntry]:
        """A job's entries, oldest first."""
        with self.reading() as session:
            return list(session.scalars(select(LedgerEntry).where(LEDGER.c.job_id == job_id).order_by(LEDGER.c.id)))

    def ledger_entry(self, job_id: str, entry_id: int) -> LedgerEntry | None:
        """One entry of a job."""
        query = select(LedgerEntry).where(LEDGER.c.job_id == job_id, LEDGER.c.id == entry_id)
        with self.reading() as session:
            return session.scalars(query).one_or_none()

    # ---- lessons -------------------------------------------------------------------------------------------------

    def add_lesson(self, project: str, family: str, lesson: str) -> None:
        """Remember a lesson; one that is known already is not written twice."""
        digest = hashlib.sha256(lesson.encode()).hexdigest()[:16]
        try:
            with self.writing() as session:
                values = {"project": project, "family": family, "digest": digest, "text": lesson}
                session.execute(insert(LESSON).values(**values, created_at=utcnow()))
                mine = (LESSON.c.project == project) & (LESSON.c.family == family)
                kept = select(LESSON.c.id).where(mine).order_by(LESSON.c.id.desc()).limit(LESSONS_KEPT)
                session.execute(delete(LESSON).where(mine, LESSON.c.id.not_in(kept)))
        except IntegrityError:
            return

    def lessons(self, project: str, family: str, limit: int) -> list[str]:
        """The newest lessons of a project and family, newest first."""
        query = (
            select(Lesson.text)  # type: ignore[call-overload]  # a column, not its Python type
            .where(LESSON.c.project == project, LESSON.c.family == family)
            .order_by(LESSON.c.id.desc())
            .limit(limit)
        )
        with self.reading() as session:
            return list(session.scalars(query))

    # ---- inside a transaction ------------------------------------------------------------------------------------

    def _end(self, entry_id: int, **values: Any) -> None:
        with self.writing() as session:
            session.execute(
                update(LEDGER)
                .where(LEDGER.c.id == entry_id, LEDGER.c.state == "reserved")
                .values(**values, finished_at=self.now(session))
            )

    def _check(self, session: Session, call: Call, limits: BudgetLimits) -> None:
        scopes = (
            ("job", limits.job, _matching(job_id=call.job_id)),
            ("project", limits.project, _matching(project=call.project)),
            ("operator", limits.operator, _matching(job_id=call.job_id, key=call.key)),
        )
        for scope, limit, matching in scopes:
            if limit is None:
                continue
            spent = self._spent(session, matching)
            over = [
                f"{name}: {getattr(spent, name):g} spent, {getattr(call.most, name):g} asked, "
                f"{getattr(limit, name):g} allowed"
                for name in ("tokens", "money", "gpu_s", "wall_s")
                if getattr(spent, name) + getattr(call.most, name) > getattr(limit, name)
            ]
            if over:
                raise spent_problem(scope, over[0])
        allowed = limits.role_tokens.get(call.role)
        if allowed is not None:
            spent = self._spent(session, _matching(job_id=call.job_id, role=call.role))
            if spent.tokens + call.most.tokens > allowed:
                raise spent_problem(f"role {call.role}", f"tokens: {spent.tokens} spent, {allowed} allowed")

    @staticmethod
    def _spent(session: Session, matching: Sequence[ColumnElement[bool]]) -> Purse:
        row = session.execute(
            select(
                func.coalesce(func.sum(LEDGER.c.tokens_in + LEDGER.c.tokens_out), 0),
                func.coalesce(func.sum(LEDGER.c.money), 0.0),
                func.coalesce(func.sum(LEDGER.c.gpu_s), 0.0),
                func.coalesce(func.sum(LEDGER.c.wall_s), 0.0),
            ).where(*matching)
        ).one()
        return Purse(tokens=int(row[0]), money=float(row[1]), gpu_s=float(row[2]), wall_s=float(row[3]))

    def _wait(self, session: Session, per_minute: int) -> float:
        now = self.now(session)
        recent = list(
            session.scalars(
                select(LEDGER.c.created_at)
                .where(LEDGER.c.model != "", LEDGER.c.created_at > now - timedelta(seconds=RATE_WINDOW_S))
                .order_by(LEDGER.c.created_at)
            )
        )
        if len(recent) < per_minute:
            return 0.0
        until = recent[len(recent) - per_minute] + timedelta(seconds=RATE_WINDOW_S)
        wait: float = (until - now).total_seconds()
        return max(0.05, wait)


def spent_problem(scope: str, detail: str) -> Problem:
    """The problem that a spent budget is."""
    return Problem("budget-spent", f"the budget of the {scope} is spent", detail, status=402, scope=scope)


def _identity(call: Call) -> dict[str, Any]:
    return {
        "job_id": call.job_id,
        "project": call.project,
        "stage": call.stage,
        "key": call.key,
        "attempt": call.attempt,
        "role": call.role,
        "call": call.call,
        "model": call.model,
        "tokens_in": 0,
        "tokens_cached": 0,
        "tokens_out": 0,
        "money": 0.0,
        "gpu_s": 0.0,
        "wall_s": 0.0,
        "note": "",
    }


def _matching(**wanted: str) -> list[ColumnElement[bool]]:
    return [LEDGER.c[name] == value for name, value in wanted.items() if value]
