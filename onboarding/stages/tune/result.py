"""What tune stores for one operator."""

from __future__ import annotations

from typing import Any

from onboarding.architecture import Record
from onboarding.context import StageResult
from onboarding.policy import Change


class TunedRow(Record):
    """The configuration chosen for one shape bucket."""

    bucket: str
    config: dict[str, Any]
    forward_ms: float
    backward_ms: float
    tried: int
    name: str = ""
    """The inputs that were timed, e.g. ``8192 tokens``."""
    seconds: float = 0.0
    """Compilation and timing of this row."""


class TuneResult(StageResult):
    """Tuned configurations, for one device."""

    device: str
    rows: list[TunedRow]
    seconds: float
    next_change: Change | None = None
    """What an analyst would change next, and the time that it expects; not tried in this job."""
