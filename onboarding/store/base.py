"""Engine, transactions, migrations, and the two things that every transition does: lock the job, append events."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session
from sqlmodel import SQLModel

from onboarding.records import Job, utcnow

JOB = SQLModel.metadata.tables["job"]
STEP = SQLModel.metadata.tables["step"]
EVENT = SQLModel.metadata.tables["event"]
ARTIFACT = SQLModel.metadata.tables["artifact"]

BUSY_TIMEOUT_S = 30
MIGRATION_LOCK = 0x6F6E626F617264
"""Key of the PostgreSQL advisory lock under which schemas are migrated."""
MIGRATIONS = Path(__file__).resolve().parents[1] / "migrations"


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """An event before it has its number."""

    kind: str
    """job | step | progress | metric | artifact"""
    data: dict[str, Any]
    stage: str = ""
    key: str = ""
    at: datetime = field(default_factory=utcnow)


class Database:
    """The engine and its transactions."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite:
            if parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
                # made here and private: SQLite would make it readable to all; its -wal and -shm files follow its mode
                os.close(os.open(parsed.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self.engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
            _prepare_sqlite(self.engine)
        else:
            self.engine = create_engine(parsed, pool_pre_ping=True)
        self._writer = self.engine.execution_options(onboard_write=True)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def ping(self) -> None:
        """Ask the database for an answer.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: it does not answer.
        """
        with self.engine.connect() as connection:
            connection.execute(text("SELECT 1"))

    def migrate(self) -> None:
        """Bring the schema up to date; safe when several processes start at the same time."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self._writer.begin() as connection:
            # SQLite: BEGIN IMMEDIATE already makes other starters wait.
            if not self.is_sqlite:
                connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session for reading; what it returns stays usable afterwards."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session in one writing transaction: committed at the end, rolled back on an exception."""
        with Session(self._writer, expire_on_commit=False, autoflush=False) as session, session.begin():
            yield session

    def now(self, session: Session) -> datetime:
        """The database's clock: leases are judged by one clock however many machines hold them."""
        if self.is_sqlite:
            return utcnow()
        moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
        return moment

    @staticmethod
    def lock_job(session: Session, job_id: str) -> Job | None:
        """Lock a job's row until the transaction ends and return it as it is now."""
        return session.scalars(select(Job).where(JOB.c.id == job_id).with_for_update()).one_or_none()

    @staticmethod
    def append(session: Session, job_id: str, events: Sequence[NewEvent]) -> int:
        """Number and store events in this transaction; artifacts among them are listed under the job.

        Returns:
            The last number given.
        """
        last: int = session.execute(
            update(JOB)
            .where(JOB.c.id == job_id)
            .values(last_seq=JOB.c.last_seq + len(events))
            .returning(JOB.c.last_seq)
        ).scalar_one()
        first = last - len(events) + 1
        rows = [
            {
                "job_id": job_id,
                "seq": first + i,
                "kind": e.kind,
                "stage": e.stage,
                "key": e.key,
                "at": e.at,
                "data": e.data,
            }
            for i, e in enumerate(events)
        ]
        if rows:
            session.execute(insert(EVENT), rows)
        for e in events:
            if e.kind == "artifact":
                _list_artifact(session, job_id, e)
        return last


def _list_artifact(session: Session, job_id: str, e: NewEvent) -> None:
    """List an artifact once: a repeated attempt stores the same bytes again."""
    identity = {"job_id": job_id, "stage": e.stage, "key": e.key, "name": e.data["name"], "digest": e.data["digest"]}
    # The job's row is locked here, so looking first is not a race.
    if session.execute(select(ARTIFACT.c.id).filter_by(**identity)).first() is None:
        size, media_type = e.data["size"], e.data["media_type"]
        session.execute(insert(ARTIFACT).values(**identity, size=size, media_type=media_type, created_at=e.at))


def _prepare_sqlite(engine: Engine) -> None:
    """WAL, foreign keys, and transactions that say at their start whether they will write.

    A transaction that reads first and writes later fails at once, whatever the busy timeout, when another one wrote in
    between; ``BEGIN IMMEDIATE`` waits at its start instead (https://sqlite.org/lang_transaction.html).
    """

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=NORMAL")
        # The switch to WAL does not wait for other starters: repeat it.
        for attempt in range(100):
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except Exception as error:
                if "locked" not in str(error) or attempt == 99:
                    raise
                time.sleep(0.05)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("onboard_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
