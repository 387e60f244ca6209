"""Alembic's entry: migrates the connection that :meth:`onboarding.store.base.Database.migrate` hands over."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlmodel import SQLModel
from sqlmodel.sql.sqltypes import AutoString

from onboarding.records import UtcDateTime


def render(kind: str, item: Any, _autogenerate: Any) -> str | Literal[False]:
    """Write our column types as plain SQLAlchemy ones: an old migration must not depend on today's code."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, AutoString):
        return "sa.String()"
    return False


connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=SQLModel.metadata, render_as_batch=True, render_item=render)
with context.begin_transaction():
    context.run_migrations()
