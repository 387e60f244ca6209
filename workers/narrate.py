"""A step's log tells what the step does: its events as lines, besides whatever the stage prints itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from onboarding.context import Emit


def say(text: str) -> None:
    """One line with the time; standard output of a step is its log."""
    print(f"{datetime.now(UTC):%H:%M:%S.%f}"[:-3], text, flush=True)


class Narrator:
    """Passes events on and writes a line for each that says something new.

    Progress comes many times a second: a line is written when its label changes, or when a whole unit was finished.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._last: tuple[str, int] | None = None

    def __call__(self, kind: str, **data: Any) -> None:
        """Send one event and tell it."""
        self._emit(kind, **data)
        if kind == "progress":
            told = (str(data["label"]), int(data["done"]))
            if told != self._last:
                self._last = told
                say(f"{data['done']:g}/{data['total']:g}  {data['label']}".rstrip())
        elif kind == "metric":
            say(f"{data['series']}  step {data['step']:g}  {data['value']:.6g}")
        elif kind == "artifact":
            say(f"stored {data['name']}  {data['size']} bytes  sha256 {data['digest'][:16]}")
        else:
            say(f"{kind}  {data}")
