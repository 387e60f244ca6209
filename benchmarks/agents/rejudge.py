"""Judges a run's accepted kernels on this machine: ``python -m benchmarks.agents.rejudge RESULTS.json [--cases N]``.

Where there is a GPU a kernel that was accepted on the interpreter is compiled, judged and timed; the
rows of the results get ``gpu``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.agents import suite
from benchmarks.agents.run import kernels_of, timed, write
from onboarding.problem import Problem
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.stage import choose_device


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every kernel was judged, accepted or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.rejudge", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cases", type=int, default=12)
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    for path in sorted(kernels_of(options.results).glob("*.py")):
        row = judged(path, options.cases)
        results["operators"][path.stem]["gpu"] = row
        write(options.results, results)
        print(f"{path.stem}: {row['outcome']} ({row['level']} on {row['device']})", flush=True)
    return 0


def judged(path: Path, cases: int) -> dict[str, Any]:
    """One kernel's verdict here, and its time where there is a GPU."""
    source, spec, device = path.read_text(), suite.load(path.stem), choose_device("auto")
    row: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    with tempfile.TemporaryDirectory(prefix="onboard-rejudge-") as folder:
        try:
            verdict = judge(source.encode(), spec, folder=Path(folder), device=device, cases=cases)
        except Problem as problem:
            return row | {"outcome": "not judged", "level": "", "device": device, "reasons": [problem.title]}
    row |= {name: getattr(verdict, name) for name in ("outcome", "level", "device", "worst_share", "seed", "reasons")}
    if verdict.outcome == "accepted" and device == "cuda":
        row["speed"] = timed(source, path.stem)
    return row


if __name__ == "__main__":
    sys.exit(main())
