"""Hints are only hints: a broker that is away costs a moment and nothing else, and waiting steps do not fill queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from onboarding.pipeline import QUEUES
from onboarding.settings import Settings
from onboarding.store import Store
from workers import app as hints
from workers import sweeper
from workers.app import make_app
from workers.sweeper import Sweeper


def new_job(store: Store) -> str:
    return store.create_job(name="toy", model_type="toy", owner="me", definition="0" * 64).id


@pytest.fixture
def sqlite(sqlite_url: str) -> Iterator[Store]:
    store = Store(sqlite_url)
    store.migrate()
    yield store
    store.close()


@pytest.mark.parametrize("url", ["redis+socket://{folder}/no.sock", "redis://127.0.0.1:1/0"])
def test_a_hint_to_a_broker_that_is_away_returns_soon(
    sqlite: Store, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "app", make_app(Settings(broker_url=url.format(folder=tmp_path))))
    job = new_job(sqlite)
    started = time.monotonic()
    assert hints.hint(sqlite, job) is False
    assert time.monotonic() - started < 3
    assert [step.stage for step in sqlite.ready_steps()] == ["intake"], "the step is there all the same"


def test_messages_are_json_and_each_queue_is_its_own(home: Path) -> None:
    app = make_app(Settings(home=home))
    assert app.conf.accept_content == ["json"]
    assert app.conf.result_backend is None
    assert {queue.name: (queue.exchange.name, queue.routing_key) for queue in app.conf.task_queues} == {
        name: (name, name) for name in QUEUES
    }


def test_the_sweeper_sends_only_the_hints_that_are_lacking(sqlite: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    queue: list[int] = []

    def keep(step_id: int, _queue: str) -> bool:
        queue.append(step_id)
        return True

    monkeypatch.setattr(sweeper, "waiting", lambda name: len(queue))
    monkeypatch.setattr(sweeper, "send", keep)
    monkeypatch.setattr(sweeper, "YOUNG_S", 0.0)
    for _ in range(3):
        new_job(sqlite)
    turn = Sweeper(sqlite, Settings())
    assert [turn.sweep() for _ in range(3)] == [3, 0, 0]
    assert Counter(queue) == {step.id: 1 for step in sqlite.ready_steps()}
    queue.clear()  # the broker died and forgot
    assert turn.sweep() == 3


def test_the_sweeper_leaves_young_steps_to_their_first_hint(sqlite: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "waiting", lambda name: 0)
    monkeypatch.setattr(sweeper, "send", lambda step_id, name: pytest.fail("sent too early"))
    monkeypatch.setattr(sweeper, "YOUNG_S", 60.0)
    new_job(sqlite)
    assert Sweeper(sqlite, Settings()).sweep() == 0
