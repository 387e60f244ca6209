"""Judges a run's accepted kernels on this machine: ``python -m benchmarks.agents.rejudge RESULTS.json``.

Where there is a GPU a kernel that was accepted on the interpreter is compiled, judged and timed there; the rows of the
results get ``gpu``. Verdicts are bound by compilation, so several are made side by side, each in a process of its own;
times are taken one after the other once no verdict is being made any more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.agents import suite
from benchmarks.agents.results import kernels_of, write
from onboarding.problem import Problem
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.stage import choose_device


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every kernel was judged, accepted or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.rejudge", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--parallel", type=int, default=1, help="verdicts side by side")
    parser.add_argument("--seconds", type=float, default=21_600.0, help="start nothing after so long, end soon after")
    parser.add_argument("--out", type=Path, help="where the results go; in place by default")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    out = options.out or options.results
    paths = sorted(kernels_of(options.results).glob("*.py"))
    if options.only:
        wanted = options.only.split(",")
        paths = sorted((p for p in paths if p.stem in wanted), key=lambda p: wanted.index(p.stem))
    begin, missing = time.monotonic(), []
    for path, row in _all(paths, options.cases, options.parallel, options.seconds):
        if row is None:
            missing.append(path.stem)
            continue
        results["operators"][path.stem]["gpu"] = row
        write(out, results)
        speed = row.get("speed") or {}
        times = ", ".join(f"{name} {value:.3g}" for name, value in speed.items() if isinstance(value, float))
        print(f"{path.stem}: {row['outcome']} ({row['level']} on {row['device']}) {times}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s; without a verdict: {', '.join(missing) or 'none'}", flush=True)
    return 1 if missing else 0


def _all(paths: list[Path], cases: int, parallel: int, seconds: float) -> list[tuple[Path, dict[str, Any] | None]]:
    """Every kernel's row; None where time ran out or its process died."""
    spawn = multiprocessing.get_context("spawn")
    waiting, turn, end = spawn.Value("i", len(paths)), spawn.Lock(), time.monotonic() + seconds
    places = spawn.Semaphore(parallel)
    with tempfile.TemporaryDirectory(prefix="onboard-rejudge-") as folder:
        answers = {path: Path(folder) / f"{path.stem}.json" for path in paths}
        running = [
            spawn.Process(target=_one, args=(path, cases, answers[path], places, waiting, turn, end)) for path in paths
        ]
        for process in running:
            process.start()
        for process in running:
            process.join(max(1.0, end + 20.0 - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        return [(path, json.loads(a.read_text()) if a.is_file() else None) for path, a in answers.items()]


def _one(path: Path, cases: int, answer: Path, places: Any, waiting: Any, turn: Any, end: float) -> None:
    """One kernel: judge, compile what will be timed, and time when all the others are ready, too."""
    row: dict[str, Any] | None = None
    ready = None
    try:
        with places:
            if time.monotonic() > end:
                return
            row = judged(path, cases)
            answer.write_text(json.dumps(row))  # a verdict stays, whatever becomes of the times
            if row["outcome"] == "accepted" and row["level"] == "compiled":
                ready = _ready(path)
    finally:
        with waiting.get_lock():
            waiting.value -= 1
    if ready is None or row is None:
        return
    while waiting.value > 0 and time.monotonic() < end:
        time.sleep(0.1)
    with turn:
        row["speed"] = ready.measure() | {"alone": waiting.value <= 0}
        answer.write_text(json.dumps(row))


def _ready(path: Path) -> Any:
    from benchmarks.agents.speed import Ready

    try:
        return Ready(path.read_text(), suite.load(path.stem))
    except Exception:  # what cannot be timed can still be judged
        traceback.print_exc()
        return None


def judged(path: Path, cases: int) -> dict[str, Any]:
    """One kernel's verdict here."""
    source, spec, device = path.read_text(), suite.load(path.stem), choose_device("auto")
    row: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    with tempfile.TemporaryDirectory(prefix="onboard-rejudge-") as folder:
        try:
            verdict = judge(source.encode(), spec, folder=Path(folder), device=device, cases=cases)
        except Problem as problem:
            return row | {"outcome": "not judged", "level": "", "device": device, "reasons": [problem.title]}
    facts = ("outcome", "level", "device", "worst_share", "seed", "reasons", "seconds")
    return row | {name: getattr(verdict, name) for name in facts} | {"cases": len(verdict.cases)}


if __name__ == "__main__":
    sys.exit(main())
