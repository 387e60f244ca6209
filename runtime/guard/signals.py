"""SIGTERM and SIGINT become a wish to stop, which all ranks agree on at the end of a step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class StopWish:
    """Catches the signals while it is entered. A second signal acts as it did before."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.wished: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopWish:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _caught(self, number: int, frame: FrameType | None) -> None:
        caught = signal.Signals(number)
        self.wished = caught.name
        signal.signal(caught, self._before.get(caught, signal.SIG_DFL))
