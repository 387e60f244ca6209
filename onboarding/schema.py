"""The published schema of a parsed architecture: ``python -m onboarding.schema`` writes it to ``docs/``.

It is what ``onboard parse --json`` prints under ``parse.architecture`` and ``GET /v1/jobs/ID/stages/parse`` under
``result.architecture``; a test keeps the file current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onboarding.architecture import Architecture

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "architecture.schema.json"


def architecture_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of :class:`onboarding.architecture.Architecture`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://onboard.invalid/schemas/architecture.json",
        **Architecture.model_json_schema(mode="serialization"),
    }


def schema_text() -> str:
    """The file's content."""
    return json.dumps(architecture_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PUBLISHED.write_text(schema_text())
    print(f"wrote {PUBLISHED}")
