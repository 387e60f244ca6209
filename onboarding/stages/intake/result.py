"""What intake stores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from onboarding.artifacts import ArtifactRef
from onboarding.context import StageResult


class IntakeResult(StageResult):
    """A checked model definition."""

    name: str
    model_type: str
    source: Literal["config", "folder", "archive", "example"]
    digest: str
    """sha256 over the sorted (path, content digest) list of the definition's files."""
    definition: ArtifactRef
    """The files as a normalised tar."""
    config: dict[str, Any]
    files: list[str]
    has_code: bool
    runs_code: bool = False
    """The definition's own code serves it (in the sandbox only); else transformers' class of its model type."""
    has_tokenizer: bool
    imports: list[str] = Field(default_factory=list)
    """Top-level packages that the definition's own code imports, read with ``ast``."""
    optional: list[str] = Field(default_factory=list)
    """Those of the imports that the code guards: it can do without."""
    suspicious: list[str] = Field(default_factory=list)
    """Calls in that code that a reviewer should see (``file:line call``); it runs only in the sandbox."""
