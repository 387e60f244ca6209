"""What generate stores for one operator."""

from __future__ import annotations

from typing import Any

from onboarding.artifacts import ArtifactRef
from onboarding.context import StageResult


class GenerateResult(StageResult):
    """A candidate."""

    spec: dict[str, Any]
    words: str
    candidate: ArtifactRef
    """The generated module's source."""
    template: str
    """``kernel_templates/<family>/template.py`` and the sha256 of its source."""
    lines: int
    kernels: list[str]
    """Names of the Triton kernels in it."""
    entry: dict[str, str]
    """``{"forward": ..., "backward": ...}``: the host functions."""
