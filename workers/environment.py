"""What every process of the service does to its environment before anything else. Free of third-party imports."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

OUTCOME_FILE = "outcome.json"
"""What a step's process leaves in its folder for the supervisor."""
STEP_MARK = "ONBOARD_STEP_FOLDER"
"""Variable by which programs that a step started can be told, wherever they have been moved to."""
TRACING_PREFIXES = ("LANGSMITH_", "LANGCHAIN_")
"""Variables that would make the graph library send prompts and results to a service outside."""


def clean_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables that switch on tracing to an outside service."""
    for name in [name for name in environment if name.startswith(TRACING_PREFIXES)]:
        del environment[name]


def check_packages() -> None:
    """Make sure that ``agents`` is ours: another distribution installs a top-level package of the same name.

    Raises:
        SystemExit: it is not; the message says which one was found.
    """
    spec = importlib.util.find_spec("agents")
    ours = Path(__file__).resolve().parents[1] / "agents"
    found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
    if found != ours:
        raise SystemExit(
            f"the Python package 'agents' is {found}, not {ours}: uninstall the distribution that brings it "
            "(openai-agents does) or use an environment of its own for onboard"
        )


def step_environment(parallel_steps: int) -> dict[str, str]:
    """Environment of a step's process: ours, with the cores shared out among the steps that run side by side."""
    environment = dict(os.environ)
    clean_environment(environment)
    threads = str(max(1, len(os.sched_getaffinity(0)) // max(1, parallel_steps)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment.setdefault(name, threads)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
