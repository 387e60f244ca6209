"""What tune stores for one operator."""

from __future__ import annotations

from typing import Any

from onboarding.architecture import Record
from onboarding.context import StageResult


class TunedRow(Record):
    """The configuration chosen for one shape bucket."""

    bucket: str
    config: dict[str, Any]
    forward_ms: float
    backward_ms: float
    tried: int


class TuneResult(StageResult):
    """Tuned configurations, for one device."""

    device: str
    rows: list[TunedRow]
    seconds: float
