"""Real runs of the twin over several processes of this machine, in a child with a time limit. Free of torch here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from typing import Any

from onboarding.context import StageContext
from onboarding.custom_code.definition import Definition
from onboarding.sandbox import module_command
from onboarding.stages.scale.result import GlooRun

WORLDS = (1, 2, 4)
WARM, STEPS = 1, 5
LIMIT_S = 240.0


def gloo_runs(context: StageContext, definition: Definition, plan: str) -> tuple[list[GlooRun], str]:
    """Train the twin at every world size.

    Returns:
        What was measured, and why something is missing (empty if nothing is).
    """
    if definition.code is not None:
        return [], (
            "the definition's own code runs in the sandbox only, and the sandbox has no network over which several "
            "processes could talk"
        )
    if not plan:
        return [], "alignment was made by an older version that did not keep the twin's plan"
    folder = context.scratch / "gloo"
    folder.mkdir()
    job = {
        "plan": plan,
        "sequence_length": context.profile.sequence_length,
        "worlds": list(WORLDS),
        "warm": WARM,
        "steps": STEPS,
        "seed": context.options.seed,
    }
    (folder / "job.json").write_text(json.dumps(job))
    argv, own = module_command("onboarding.stages.scale.gloo_child", ["job.json"])
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context.progress(0, 1, f"the twin over {', '.join(map(str, WORLDS))} processes")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            return _read(printed), f"the runs took longer than {LIMIT_S:g} s and were stopped"
        errors.seek(0)
        last = " ".join(errors.read().strip().splitlines()[-1:])
    runs = _read(printed)
    return runs, "" if process.returncode == 0 else f"exit {process.returncode}: {last}"[:500]


def _read(printed: str) -> list[GlooRun]:
    found: list[dict[str, Any]] = []
    for line in printed.splitlines():
        try:
            found.append(json.loads(line)["run"])
        except (ValueError, KeyError, TypeError):
            continue  # what a library prints
    if not found:
        return []
    alone = found[0]["losses"]
    return [
        GlooRun(
            **run, difference=max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(run["losses"], alone, strict=True))
        )
        for run in found
    ]
