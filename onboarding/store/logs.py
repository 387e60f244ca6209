"""Where a step's log lies."""

from __future__ import annotations

from pathlib import Path

from onboarding.settings import Settings


def log_path(settings: Settings, job_id: str, stage: str, key: str, attempt: int) -> Path:
    """The capped log file of one attempt of a step: its standard output, errors and tracebacks."""
    name = "-".join(part for part in (stage, key, str(attempt)) if part)
    return settings.resolved_home / "logs" / job_id / f"{name}.log"
