"""What parse stores."""

from __future__ import annotations

from onboarding.architecture import Architecture
from onboarding.artifacts import ArtifactRef
from onboarding.context import StageResult
from onboarding.weights.result import WeightsReport


class ParseResult(StageResult):
    """The parsed architecture."""

    architecture: Architecture
    weights: WeightsReport | None = None
    """How the published checkpoint fits; None where the definition holds no index of it."""
    mapping: ArtifactRef | None = None
    """JSON list of placements: for each parameter, what it is made of."""
    seconds: float
