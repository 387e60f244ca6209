"""Candidates of these tests run in forks of one warm parent, as in a worker: tests that judge import the fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onboarding.sandbox import warm


@pytest.fixture(scope="session", autouse=True)
def warm_parent() -> Iterator[None]:
    warm.prestart()
    yield
    warm.give_up()
