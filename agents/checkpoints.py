"""Where graph checkpoints live: SQLite beside the embedded database, or PostgreSQL in production."""

from __future__ import annotations

import fcntl
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from onboarding.settings import Settings


@contextmanager
def open_checkpointer(settings: Settings) -> Iterator[BaseCheckpointSaver[str]]:
    """A checkpointer on the database in force, with its tables present."""
    url = settings.resolved_database_url()
    if url.startswith("postgresql"):
        from langgraph.checkpoint.postgres import PostgresSaver

        # SQLAlchemy names the driver in the scheme; psycopg itself does not know that form.
        with PostgresSaver.from_conn_string("postgresql://" + url.split("://", 1)[1]) as saver:
            _set_up_alone(saver)
            yield saver
        return
    path = settings.resolved_home / "graphs.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Steps of several operators write side by side: wait for the lock rather than fail.
    connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    try:
        sqlite_saver = SqliteSaver(connection)
        # Turning write-ahead logging on does not wait for other connections as a write does.
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sqlite_saver.setup()
        yield sqlite_saver
    finally:
        connection.close()


def _set_up_alone(saver: Any) -> None:
    """Create the tables while no other step does: "if not exists" is no protection at the same moment.

    Asks for the lock again and again: a session that waits inside a statement would hold up "create index
    concurrently", which waits for every statement that began before it.
    """
    while not saver.conn.execute("select pg_try_advisory_lock(hashtext('onboard.graphs')) as own").fetchone()["own"]:
        time.sleep(0.05)
    try:
        saver.setup()
    finally:
        saver.conn.execute("select pg_advisory_unlock(hashtext('onboard.graphs'))")
