"""Where a run's results and kernels lie. Needs no agent: a GPU machine judges with torch and triton alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kernels_of(out: Path) -> Path:
    """Where a run's accepted kernels lie, beside its results."""
    return out.with_name(f"{out.stem}_kernels")


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    aside.replace(path)
