"""A home whose steps are toy stages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_service import TOY, Toy, free_port, until

from onboarding.pipeline import STAGES
from onboarding.settings import Settings
from onboarding.store import Store


@pytest.fixture
def toy(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    """A home with toy stages; whatever was started on it is gone afterwards."""
    control = tmp_path / "control"
    control.mkdir()
    package = tmp_path / "toys" / "toy_stages"
    for stage in STAGES:
        folder = package / stage.name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "stage.py").write_text(TOY)
    (package / "__init__.py").touch()
    environment = dict(os.environ) | {
        "PYTHONPATH": str(package.parent),
        "TOY_CONTROL": str(control),
        "ONBOARD_STAGES_PACKAGE": "toy_stages",
        "ONBOARD_PORT": str(free_port()),
        "ONBOARD_HOME": str(home),
    }
    opened = Store(Settings(home=home).resolved_database_url())
    opened.migrate()
    toy = Toy(home=home, control=control, environment=environment, store=opened)
    yield toy
    for process in toy.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not toy.processes(), 5, "everything is gone")
    toy.store.close()
