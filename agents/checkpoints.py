"""Where graph checkpoints live: SQLite beside the embedded database, or PostgreSQL in production."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

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
            saver.setup()
            yield saver
        return
    path = settings.resolved_home / "graphs.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Steps of several operators write side by side: wait for the lock rather than fail.
    connection = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    try:
        sqlite_saver = SqliteSaver(connection)
        sqlite_saver.setup()
        yield sqlite_saver
    finally:
        connection.close()
