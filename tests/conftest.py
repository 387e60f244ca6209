"""Fixtures that every part uses (a fresh home, private databases on SQLite and PostgreSQL), and tables at the end."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from onboarding.store import Store

POSTGRES_SERVER = os.environ.get("ONBOARD_TEST_POSTGRES_URL", "postgresql+psycopg://root@127.0.0.1:5432/postgres")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home, with no settings of the caller's environment in force."""
    for name in [name for name in os.environ if name.startswith("ONBOARD_") and not name.startswith("ONBOARD_TEST_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("ONBOARD_HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'onboard.db'}"


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """An empty PostgreSQL database, dropped afterwards; skips without a server, but not in CI."""
    server = create_engine(POSTGRES_SERVER, isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 3})
    name = f"onboard_test_{uuid.uuid4().hex[:12]}"
    try:
        with server.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
    except OperationalError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no PostgreSQL server: {error}")
    try:
        yield make_url(POSTGRES_SERVER).set(database=name).render_as_string(hide_password=False)
    finally:
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A private database, once on SQLite and once on PostgreSQL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """A migrated store on a private database."""
    opened = Store(database_url)
    opened.migrate()
    yield opened
    opened.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The corpus of the judge as a table: class, submission, verdict, reason."""
    reports = [r for group in ("passed", "failed") for r in terminalreporter.stats.get(group, [])]
    rows = sorted(row for r in reports for name, row in getattr(r, "user_properties", []) if name == "corpus")
    if not rows:
        return
    terminalreporter.section("corpus of the judge")
    for kind, name, outcome, reason in rows:
        terminalreporter.write_line(f"{kind:14} {name:32} {outcome:9} {' '.join(reason.split())[:110]}")
    honest = [row for row in rows if row[0] == "honest"]
    accepted = sum(row[2] == "accepted" for row in honest)
    refused = sum(row[2] == "refused" for row in rows if row[0] != "honest")
    terminalreporter.write_line(
        f"{refused} of {len(rows) - len(honest)} exploits refused, {accepted} of {len(honest)} honest kernels accepted"
    )
