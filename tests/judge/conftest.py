"""Candidates of these tests run in forks of one warm parent, as in a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onboarding.sandbox import warm


@pytest.fixture(scope="session", autouse=True)
def warm_parent() -> Iterator[None]:
    warm.prestart()
    yield
    warm.give_up()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The corpus as a table: class, submission, verdict, reason."""
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
