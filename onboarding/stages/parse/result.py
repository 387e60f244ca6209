"""What parse stores."""

from __future__ import annotations

from onboarding.architecture import Architecture
from onboarding.context import StageResult


class ParseResult(StageResult):
    """The parsed architecture."""

    architecture: Architecture
    seconds: float
