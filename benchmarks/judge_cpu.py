"""``python -m benchmarks.judge_cpu``: what judging costs without a GPU: sandbox, warm child, verdicts, the cache.

Times by the clock, and CPU seconds of this process and its children beside them: the clock says little on a machine
that is busy with something else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.candidate import source
from kernel_templates.registry import spec_class
from kernel_templates.spec import OperatorSpec
from onboarding.sandbox import Limits, Sandbox, backends, process, warm, works
from onboarding.stages.judge.examinee import Examinee
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.stage import VerdictCache

SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm, gated": ("norm", {"hidden": 2304, "gate": "sigmoid"}),
    "swiglu": ("gated_activation", {"width": 9216}),
    "short convolution": ("short_convolution", {"channels": 4096}),
}


def timed(call: Callable[[], object], count: int) -> dict[str, float]:
    """Median and best of ``count`` calls in milliseconds, and CPU milliseconds of one."""
    walls = []
    before = os.times()
    for _ in range(count):
        begin = time.perf_counter()
        call()
        walls.append(1e3 * (time.perf_counter() - begin))
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    return {"median ms": statistics.median(walls), "best ms": min(walls), "cpu ms": 1e3 * cpu / count}


def launch(backend: backends.Backend, folder: Path) -> None:
    """Start and end one confined program that does nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        running = process.start(
            backend, ["/bin/true"], scratch=Path(place), read_only=[], limits=Limits(wall_s=20), env={}
        )
        outcome = running.wait()
    if not outcome.ok:
        raise RuntimeError(f"{backend.name}: {outcome.reason}: {outcome.stderr_tail}")


def child(folder: Path) -> None:
    """Start a warm child and wait until it is ready for a candidate."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        examinee = Examinee(Sandbox(), Path(place), "cpu", Limits(wall_s=60), 30.0)
        try:
            examinee.ready()
        finally:
            examinee.close()


def cached(cache: VerdictCache, text: bytes, spec: OperatorSpec, cases: int) -> None:
    """Find a stored verdict."""
    if cache.get(cache.key(text, spec, "cpu", cases)) is None:
        raise RuntimeError("the verdict is not stored: it was no acceptance")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_cpu", description=__doc__)
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}

    def say(name: str, numbers: dict[str, float]) -> None:
        found[name] = {key: round(value, 2) for key, value in numbers.items()}
        print(f"{name:34} " + "  ".join(f"{key} {value:9.2f}" for key, value in numbers.items()), flush=True)

    with tempfile.TemporaryDirectory(prefix="onboard-cost-") as scratch:
        folder = Path(scratch)
        for backend in backends.ORDER:
            if not works(backend):
                say(f"launch, {backend.name}", timed(partial(launch, backend, folder), options.count))
        warm.prestart()
        child(folder)  # the parent's imports
        say("warm child ready and ended", timed(partial(child, folder), options.count))
        for name, (family, flags) in SPECS.items():
            spec = spec_class(family)(**flags)
            text = source(spec).encode()
            place = folder / name
            place.mkdir()
            begin, before = time.perf_counter(), os.times()
            verdict = judge(text, spec, folder=place, cases=options.cases, seed=1)
            after = os.times()
            own = sum(after[:2]) - sum(before[:2])
            numbers = {"seconds": time.perf_counter() - begin, "own cpu s": own, "cases": len(verdict.cases)}
            say(f"verdict, {name}: {verdict.outcome}", numbers)
            cache = VerdictCache(folder / "verdicts")
            cache.put(cache.key(text, spec, "cpu", options.cases), verdict)
            say(f"cached, {name}", timed(partial(cached, cache, text, spec, options.cases), 5))
        warm.give_up()
    if options.out:
        options.out.write_text(json.dumps({"load": os.getloadavg(), "numbers": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
