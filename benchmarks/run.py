"""``python -m benchmarks.run --out DIR [--only NAME] [--peers]``: the kernels beside their peers, as JSON and a table.

One process on one GPU. Peers are whatever of liger-kernel, fla-core and transformers can be imported. The commit is
taken from git, or from ONBOARD_COMMIT where there is no repository.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import BENCHMARKS, Benchmark
from onboarding.stages.tune.compiling import compile_configs, shapes_of, start_pool

CONTESTANT = "onboard"
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "fla-core")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when every candidate is right and was measured, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--only", action="append", default=[], help="run benchmarks whose name contains this")
    parser.add_argument("--peers", action="store_true", help="measure the peers in the same run")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which nothing new is started")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter: proves the path, not the speed")
    options = parser.parse_args(arguments)
    # before anything touches the GPU: the kernels of a benchmark compile side by side
    pool = None if options.tiny else start_pool()
    cuda = torch.cuda.is_available()
    if not cuda:
        from kernel_templates import interpreter

        if not options.tiny:
            parser.error("there is no GPU here; --tiny proves the path on the CPU")
        interpreter.activate()
    chosen = [b for b in BENCHMARKS if not options.only or any(word in b.name for word in options.only)]
    if not chosen:
        parser.error(f"no such benchmark; there are: {', '.join(b.name for b in BENCHMARKS)}")
    device = torch.device("cuda" if cuda else "cpu")
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name() if cuda else "cpu, interpreted"
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"kernels-{name.lower().replace(',', '').replace(' ', '_')}.json"
    record: dict[str, Any] = {
        "device": name,
        "commit": commit(),
        "versions": versions(),
        "measured": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in chosen:
            left = options.budget - (time.monotonic() - began)
            size = "tiny" if options.tiny else "full"
            rows.append(_row(benchmark, device, Path(folder), pool, options.peers, size, left))
            record["seconds"] = round(time.monotonic() - began, 1)
            # after every row: what was measured is kept when a later peer tunes past the limit
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{record['seconds']:6.1f} s  {benchmark.name}: {rows[-1]['status']}", file=sys.stderr)
            print(table(rows[-1:]), file=sys.stderr)
            if cuda:
                torch.cuda.empty_cache()
    print(f"{name}, commit {record['commit'][:12]}, {record['seconds']} s -> {path}\n{table(rows)}")
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def _row(
    benchmark: Benchmark,
    device: torch.device,
    folder: Path,
    pool: Pool | None,
    with_peers: bool,
    size: str,
    left: float,
) -> dict[str, Any]:
    """One benchmark's record; a failure is recorded, never raised."""
    shown = benchmark.at(size)
    row: dict[str, Any] = {
        "name": benchmark.name,
        "spec": shown.spec.to_dict(),
        "tokens": shown.tokens,
        "frozen": list(benchmark.frozen),
        "size": size,
        "status": "ok",
        "floor_h200_ms": {"forward": shown.floor_ms(False), "forward_backward": shown.floor_ms(True)},
    }
    if left <= 0:
        return row | {"status": "not run: the time budget was used up"}
    try:
        reduced = benchmark.at("tiny" if size == "tiny" else "reduced")
        if pool is not None:
            for some in (reduced, shown):
                _compile(some, device, folder, pool)
        row["numerics"] = _numerics(reduced, device, folder)
        wrong = [n for n, e in row["numerics"].items() if not e["error"] <= e["limit"]]
        if wrong:
            row["status"] = f"wrong: {', '.join(wrong)}"
        _measure(shown, device, folder, with_peers, row)
    except Exception as problem:
        row["status"] = f"failed: {type(problem).__name__}: {problem}"[:400]
    return row


def _compile(benchmark: Benchmark, device: torch.device, folder: Path, pool: Pool) -> None:
    """Fill Triton's cache; what does not compile says so when it is launched."""
    from benchmarks import candidate, inputs

    tensors = inputs.make(benchmark, device)
    run = candidate.operator(benchmark.spec, folder)
    major, minor = torch.cuda.get_device_capability(device)
    path = Path(str(run.candidate.__file__))
    compile_configs(pool, path, shapes_of(tensors), [run.config(**tensors)], 10 * major + minor)


def _numerics(benchmark: Benchmark, device: torch.device, folder: Path) -> dict[str, dict[str, float]]:
    from benchmarks import candidate, inputs

    tensors = inputs.make(benchmark, device)
    return candidate.numerics(benchmark, tensors, candidate.operator(benchmark.spec, folder))


def _measure(benchmark: Benchmark, device: torch.device, folder: Path, with_peers: bool, row: dict[str, Any]) -> None:
    """Adds the times of the candidate and of the peers to ``row``."""
    from benchmarks import candidate, inputs
    from benchmarks.peers import PEERS
    from benchmarks.timing import Contestant, median, prepare, race

    tensors = inputs.make(benchmark, device)
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    run = candidate.operator(benchmark.spec, folder)
    row["config"] = run.config(**tensors)
    with torch.no_grad():
        first = run(**tensors)[0]
    upstream = torch.randn(first.shape, device=device).to(first.dtype)
    found = [Contestant(CONTESTANT, lambda: run(**tensors)[0])]
    prepare(found[0], leaves, upstream)
    row["peers_absent"] = {}
    for name in benchmark.peers if with_peers else ():
        try:
            peer = Contestant(name, PEERS[name](benchmark, tensors))
            prepare(peer, leaves, upstream)
            found.append(peer)
        except Exception as problem:
            row["peers_absent"][name] = f"{type(problem).__name__}: {problem}"[:200]
    race(found, leaves, upstream)
    row["times"] = {
        c.name: {
            "forward_ms": median(c.forward_ms),
            "forward_backward_ms": median(c.both_ms),
            "peak_gib": c.peak_gib,
            "first_s": c.first_s,
            "rounds": len(c.both_ms),
        }
        for c in found
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The short table: own time, share of the floor, best peer and the ratio to it."""
    lines = [f"{'':42} {'fwd ms':>8} {'fwd+bwd':>8} {'floor':>7} {'peak GiB':>8}  peer fwd+bwd, ratio"]
    for row in rows:
        times = row.get("times")
        if not times:
            lines.append(f"{row['name']:42} {row['status']}")
            continue
        own = times[CONTESTANT]
        line = f"{row['name']:42} {own['forward_ms']:8.3f} {own['forward_backward_ms']:8.3f} "
        line += f"{row['floor_h200_ms']['forward_backward']:7.3f} {own['peak_gib']:8.2f}  "
        parts = [
            f"{name} {t['forward_backward_ms']:.3f}, {t['forward_backward_ms'] / own['forward_backward_ms']:.2f}x"
            for name, t in times.items()
            if name != CONTESTANT
        ]
        parts += [f"{name}: {reason[:40]}" for name, reason in row["peers_absent"].items()]
        lines.append(line + "; ".join(parts) + ("" if row["status"] == "ok" else f"  {row['status']}"))
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what takes part, of those that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured; ``unknown`` where nothing says."""
    given = os.environ.get("ONBOARD_COMMIT")
    if given:
        return given
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
