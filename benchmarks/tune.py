"""``python -m benchmarks.tune --out DIR [--only NAME]``: the tuner on the published sizes, as rows for shipped tables.

Runs what a job's tune stage runs in its sandbox, on the same candidates, and writes ``tuned.json``: for every benchmark
the bucket, the fastest configuration with its times, those of the shipped row, and the seconds that it took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch

from benchmarks.candidate import TEMPLATES, source
from benchmarks.registry import BENCHMARKS, Benchmark
from kernel_templates.configs import Chooser
from kernel_templates.launch import quicken
from kernel_templates.loading import load_source
from kernel_templates.registry import family_module
from onboarding.stages.tune.child import Bench, tune
from onboarding.stages.tune.compiling import compile_configs, shapes_of, start_pool


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every benchmark was tuned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="tune benchmarks whose name contains this")
    parser.add_argument("--seconds", type=float, default=15.0, help="timing of one benchmark; compilation comes on top")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which nothing new is started")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    with start_pool() as pool:
        for benchmark in BENCHMARKS:
            if options.only and not any(word in benchmark.name for word in options.only):
                continue
            if time.monotonic() - began > options.budget:
                break
            rows.append(_row(benchmark, pool, options))
            (options.out / "tuned.json").write_text(json.dumps(rows, indent=1) + "\n")
            print(_words(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    return 0 if all("config" in row for row in rows) else 1


def _row(benchmark: Benchmark, pool: Pool, options: argparse.Namespace) -> dict[str, Any]:
    """One benchmark's best configuration; a failure is recorded, never raised."""
    spec: Any = benchmark.spec
    row: dict[str, Any] = {"name": benchmark.name, "family": spec.family}
    began = time.monotonic()
    try:
        module = load_source(source(spec), options.out)
        quicken(module)
        case = family_module(spec.family, "cases").training_case(spec, benchmark.tokens)
        bench = Bench(module, spec, case)
        bench.needs -= set(benchmark.frozen)
        bucket = module.bucket(bench.sets[0])
        shipped = Chooser.from_folder(TEMPLATES / spec.family / "configs")(bucket, torch.device("cuda"))
        configs = [shipped, *(c for c in family_module(spec.family, "tuning").space(spec, bucket) if c != shipped)]
        shapes = shapes_of(bench.sets[0])

        def compiled(some: list[dict[str, Any]]) -> list[bool]:
            return [not each.errors for each in compile_configs(pool, Path(module.__file__ or ""), shapes, some, 90)]

        ranked = tune(bench, configs, compiled, options.seconds, lambda **_: None)
        best = ranked[0]
        own = next((e for e in ranked if e.config == shipped), None)
        row |= {
            "bucket": bucket,
            "config": best.config,
            "total_ms": best.total_ms,
            "shipped_ms": own.total_ms if own else None,
            "space": len(configs),
            "finalists": [{"total_ms": e.total_ms, "changed": _changed(shipped, e.config)} for e in ranked],
        }
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {problem}"[:500]
    return row | {"seconds": round(time.monotonic() - began, 1)}


def _changed(base: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in config.items() if base.get(n) != v}


def _words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    first = row["finalists"][0]
    shipped = "not a finalist" if row["shipped_ms"] is None else f"{row['shipped_ms']:.3f} ms"
    return (
        f"{row['name']:42} {row['total_ms']:.3f} ms (shipped: {shipped}), {row['space']} configurations in "
        f"{row['seconds']:.0f} s: {first['changed'] or 'the shipped one'}"
    )


if __name__ == "__main__":
    sys.exit(main())
