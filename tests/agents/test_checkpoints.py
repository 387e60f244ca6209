"""Steps of one job open the graphs' database at the same moment, also the first time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from agents.checkpoints import open_checkpointer
from onboarding.settings import Settings

OPENERS = 4


def _open(settings: Settings, gate: Any) -> None:
    gate.wait()
    for _ in range(5):
        with open_checkpointer(settings) as saver:
            assert saver.get_tuple({"configurable": {"thread_id": "none"}}) is None


def _together(settings: Settings) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(OPENERS)
    steps = [context.Process(target=_open, args=(settings, gate)) for _ in range(OPENERS)]
    for step in steps:
        step.start()
    for step in steps:
        step.join(60)
    return [step.exitcode for step in steps]


@pytest.mark.parametrize("turn", range(5))
def test_steps_that_open_a_new_database_together_all_get_it(tmp_path: Path, turn: int) -> None:
    assert _together(Settings(home=tmp_path)) == [0] * OPENERS


@pytest.mark.postgres
def test_steps_that_open_a_new_postgres_database_together_all_get_it(postgres_url: str, tmp_path: Path) -> None:
    assert _together(Settings(home=tmp_path, database_url=postgres_url)) == [0] * OPENERS
