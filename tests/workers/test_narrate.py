"""What a step's log says."""

from __future__ import annotations

from typing import Any

import pytest

from workers.narrate import Narrator


def test_events_pass_on_and_only_news_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    passed: list[tuple[str, dict[str, Any]]] = []
    narrator = Narrator(lambda kind, **data: passed.append((kind, data)))
    for done in (0.0, 0.2, 0.9, 1.0):
        narrator("progress", done=done, total=2, label="case 0")
    narrator("progress", done=1.0, total=2, label="case 1")
    narrator("metric", series="loss", step=3, value=5.25)
    narrator("artifact", name="candidate.py", size=12, digest="ab" * 32, media_type="text/plain")
    assert [kind for kind, _ in passed] == ["progress"] * 5 + ["metric", "artifact"]
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "0/2  case 0",
        "1/2  case 0",
        "1/2  case 1",
        "loss  step 3  5.25",
        f"stored candidate.py  12 bytes  sha256 {'ab' * 8}",
    ]
