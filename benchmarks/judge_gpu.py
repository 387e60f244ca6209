"""``python -m benchmarks.judge_gpu --out DIR``: the judge's verdict on one candidate of every variant, on the GPU.

Every candidate is written by the generate stage and judged by ``python -m onboarding.stages.judge`` in a process of its
own, several at a time: compilation takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.registry import VARIANTS


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when all are accepted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for candidates and verdicts")
    parser.add_argument("--only", action="append", default=[], help="judge variants whose name contains this")
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one verdict")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cuda")
    parser.add_argument("--unsafe-no-sandbox", action="store_true", help="where the machine has no sandbox")
    options = parser.parse_args(arguments)
    names = [n for n in VARIANTS if not options.only or any(word in n for word in options.only)]
    options.out.mkdir(parents=True, exist_ok=True)
    verdicts: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(_judge, name, options) for name in names]):
            verdicts.append(done.result())
            # after every verdict: what was judged is kept when the machine goes first
            (options.out / "verdicts.json").write_text(json.dumps(verdicts, indent=1) + "\n")
            _say(verdicts[-1])
    return 0 if all(v["outcome"] == "accepted" for v in verdicts) else 1


def _say(verdict: dict[str, Any]) -> None:
    print(
        f"{verdict['outcome']:9} {verdict['level']:12} {verdict['accepted']:>2}/{verdict['cases']:<2} cases  "
        f"{verdict['seconds']:4.0f} s  {verdict['name']:28} "
        f"worst {verdict['worst_share']:.2f} ({verdict['worst_where']})",
        flush=True,
    )
    if "phases" in verdict:
        print("          " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in verdict["phases"].items()))
    for reason in verdict["reasons"][:3]:
        print(f"          {reason}", flush=True)


def _judge(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One verdict in short; a judge that cannot run is a refusal with its last words."""
    from benchmarks.candidate import source

    spec = VARIANTS[name]
    candidate = options.out / f"{spec.family}_{spec.digest()}.py"
    candidate.write_text(source(spec))
    command = [sys.executable, "-m", "onboarding.stages.judge", str(candidate), "--json", "--device", options.device]
    command += ["--cases", str(options.cases), *["--unsafe-no-sandbox"] * options.unsafe_no_sandbox]
    # The fp64 references run on the CPU: side by side they must share its cores, not fight for them.
    threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": threads},
            timeout=options.limit,
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 124, "", f"no verdict within {options.limit:.0f} s")
    seconds = time.monotonic() - began
    short = {"name": name, "spec": spec.to_dict(), "seconds": round(seconds, 1)}
    try:
        result = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-3:] or [f"exit status {done.returncode}"]
        nothing = {"outcome": "not judged", "level": "", "cases": 0, "accepted": 0, "worst_share": 0.0}
        return short | nothing | {"worst_where": "", "reasons": last}
    kept = {
        n: result[n]
        for n in ("outcome", "level", "device", "triton", "torch", "seed", "worst_share", "worst_where", "phases")
    }
    counts = {"cases": len(result["cases"]), "accepted": sum(c["passed"] for c in result["cases"])}
    return short | kept | counts | {"reasons": result["reasons"]}


if __name__ == "__main__":
    sys.exit(main())
