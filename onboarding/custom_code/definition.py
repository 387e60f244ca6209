"""A model definition as the stages use it: its configuration and, where it has any, its code. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboarding.context import StageContext
from onboarding.stages.intake.archive import unpack
from onboarding.stages.intake.result import IntakeResult

CONFIG = "config.json"
CONFINED = {"ONBOARD_CONFINED": "1"}
"""Environment of the sandboxed processes that may import a definition's code; its import refuses to run elsewhere."""
PACKAGE = "onboard_definition"
"""Name under which a definition's own files are imported; bundles match classes by what follows it."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a model is built from."""

    config: dict[str, Any]
    code: Path | None = None
    """Folder with the definition's Python files; None: transformers' own classes serve it."""


def definition_of(context: StageContext) -> Definition:
    """The job's checked definition; its code is written below the scratch folder, executed by nothing yet.

    Raises:
        LookupError: intake has not finished.
    """
    intake = context.result("intake", IntakeResult)
    if not intake.runs_code:
        return Definition(config=intake.config)
    files = unpack(context.artifacts.get(intake.definition.digest))
    return Definition(config=intake.config, code=write_code(intake.config, files, context.scratch / "definition"))


def write_code(config: dict[str, Any], files: dict[str, bytes], folder: Path) -> Path:
    """Write what building the model needs, and return the folder.

    Args:
        config: the checked configuration; written as ``config.json``, it may say more than the submitted one.
        files: the definition's files; their paths were checked on unpacking.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name.endswith((".py", ".json", ".txt")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder
