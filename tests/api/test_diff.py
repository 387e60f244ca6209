"""``onboard diff``: two parses, one comparison, in words and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import local
from api.cli.main import app
from tests.api.story import architecture


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Parsing answers at once: the second model has another mixer and twice the layers."""
    asked: list[str] = []

    def run_parse(what: str, **_: Any) -> dict[str, Any]:
        asked.append(what)
        found = architecture().model_copy(update={"name": what})
        if what == "new":
            other = found.blocks[1].model_copy(update={"mixer": "lightning"})
            found = found.model_copy(update={"num_layers": 54, "blocks": [found.blocks[0], other]})
        return {"parse": {"architecture": found.model_dump(mode="json")}}

    monkeypatch.setattr(local, "run_parse", run_parse)
    return asked


def test_what_is_new_is_told(parses: list[str]) -> None:
    shown = CliRunner().invoke(app, ["diff", "old", "new"])
    assert shown.exit_code == 0, shown.output
    assert parses == ["old", "new"]
    lines = shown.output.splitlines()
    assert any(line.split()[:2] == ["new", "mixer:"] and "lightning" in line for line in lines)
    assert any(line.startswith("gone") and "MLA" in line for line in lines)
    assert any(line.startswith("layers") and "27" in line and "54" in line for line in lines)
    assert not any(line.startswith("same") for line in lines)
    everything = CliRunner().invoke(app, ["diff", "old", "new", "--all"]).output
    assert any(line.startswith("same") for line in everything.splitlines())


def test_machines_get_json(parses: list[str]) -> None:
    shown = CliRunner().invoke(app, ["diff", "old", "new", "--json"])
    found = json.loads(shown.output)
    assert {d["name"]: d["state"] for d in found["features"]}["mixer: lightning"] == "new"
    assert found["before"] == "old"
