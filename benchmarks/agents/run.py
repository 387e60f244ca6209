"""Runs the evaluation suite: ``python -m benchmarks.agents.run [--draw N --seed S | --only a,b] --out FILE``.

For each operator: a search with the configured language model (``ONBOARD_LLM_*``), the judge's verdict, what it took,
and on a GPU the accepted kernel's time against torch.compile. Which operators are drawn depends on the seed only and is
written before the first is tried. A run that is interrupted goes on where it stood: answers are in the ledger.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from agents.llm.cassette import Recorder
from agents.llm.endpoint import _sdk
from agents.solo import Solo, Solved
from benchmarks.agents import suite
from benchmarks.agents.results import kernels_of, write
from onboarding.pipeline import JobOptions
from onboarding.policy import RUNGS
from onboarding.settings import Settings

NO_LIMIT_S = 1e9
"""No step's time limit ends a search here; the budget does."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every drawn operator was searched to its end, accepted or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.run", description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--draw", type=int, default=0, help="draw so many of the suite")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--home", type=Path, default=Path(".onboard-evaluation"), help="a home of its own")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the results")
    parser.add_argument("--cassette", type=Path, help="record every exchange here")
    parser.add_argument("--responder", default="", help="who answers, for the results and the cassette")
    parser.add_argument("--parallel", type=int, default=1, help="operators side by side")
    options = parser.parse_args(arguments)
    settings = Settings(home=options.home, step_wall_s=NO_LIMIT_S)
    if not settings.llm.configured:
        print("set ONBOARD_LLM_BASE_URL and ONBOARD_LLM_MODEL first", file=sys.stderr)
        return 2
    chosen = drawn(options.only, options.draw, options.seed)
    results: dict[str, Any] = header(settings, options.responder, options.seed, chosen)
    results["operators"] = earlier(options.out, results)
    write(options.out, results)  # what was drawn stands there before anything is tried
    send = _sdk(settings.llm)
    if options.cassette is not None:
        made = {"responder": options.responder, "model": settings.llm.model, "date": results["date"]}
        send = Recorder(send, options.cassette, made)
    bench = Solo(settings=settings, options=JobOptions(policy="llm", profile="standard"), send=send)

    with ThreadPoolExecutor(max(1, options.parallel)) as pool:
        running = {pool.submit(evaluate, bench, name): name for name in chosen if name not in results["operators"]}
        for ended in as_completed(running):
            name, row = running[ended], ended.result()
            results["operators"][name] = row
            keep(options.out, name, row.pop("source"))
            write(options.out, results)
            print(f"{name}: {'accepted' if row['accepted'] else row['reason']}", flush=True)
    results["score"] = score(results["operators"])
    write(options.out, results)
    print(json.dumps(results["score"]))
    return 0


def drawn(only: str, draw: int, seed: int) -> list[str]:
    """The operators of a run."""
    every = suite.names()
    if only:
        wanted = [name for name in only.split(",") if name]
        unknown = sorted(set(wanted) - set(every))
        if unknown:
            raise SystemExit(f"no operator {', '.join(unknown)}; known: {', '.join(every)}")
        return wanted
    return sorted(random.Random(seed).sample(every, min(draw or len(every), len(every))))


def earlier(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """What an earlier start of the same run has finished; what broke off is tried again."""
    if not out.is_file():
        return {}
    before = json.loads(out.read_text())
    same = all(before.get(name) == results[name] for name in ("drawn", "seed", "model", "responder"))
    return {name: row for name, row in before["operators"].items() if "broken" not in row} if same else {}


def header(settings: Settings, responder: str, seed: int, chosen: list[str]) -> dict[str, Any]:
    """What the results were made with."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, interpreted"
    return {
        "suite": len(suite.names()),
        "drawn": chosen,
        "seed": seed,
        "model": settings.llm.model,
        "responder": responder,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "device": device,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "operators": {},
    }


def evaluate(bench: Solo, name: str) -> dict[str, Any]:
    """One operator's row; a fault of ours ends this operator, not the run."""
    spec, begin = suite.load(name), time.monotonic()
    try:
        solved = bench.search(spec)
    except Exception as error:
        traceback.print_exc()
        job_id = bench.job(spec)
        broken = Solved(
            accepted=False,
            reason=f"broken off by a fault that is not the candidate's: {type(error).__name__}: {error}"[:600],
            verdict=None,
            source="",
            tries=bench.tries(job_id, spec.digest()),
            spent=bench.store.spent(job_id=job_id),
            job_id=job_id,
        )
        return row_of(broken, time.monotonic() - begin) | {"speed": None, "broken": True}
    row = row_of(solved, time.monotonic() - begin)
    row["speed"] = timed(solved.source, name) if solved.accepted and torch.cuda.is_available() else None
    return row


def row_of(solved: Solved, seconds: float) -> dict[str, Any]:
    """What came of a search, as JSON."""
    verdict = solved.verdict
    return {
        "accepted": solved.accepted,
        "reason": solved.reason,
        "level": verdict.level if verdict else "",
        "worst_share": verdict.worst_share if verdict else None,
        "cases": len(verdict.cases) if verdict else 0,
        "tries": [{"origin": t.origin, "rung": RUNGS[t.rung], "refused": t.refused} for t in solved.tries],
        "spent": asdict(solved.spent),
        "seconds": round(seconds, 1),
        "lines": solved.source.count("\n"),
        "source": solved.source,
    }


def timed(source: str, name: str) -> dict[str, float]:
    """Milliseconds of forward and backward, and of torch.compile on the reference: our own code, so in this process."""
    from benchmarks.agents.speed import compare

    return compare(source, suite.load(name))


def score(rows: dict[str, Any]) -> dict[str, Any]:
    """The suite's score."""
    accepted = [row for row in rows.values() if row["accepted"]]
    total: Callable[[str], float] = lambda what: sum(row["spent"][what] for row in rows.values())  # noqa: E731
    return {
        "operators": len(rows),
        "accepted": len(accepted),
        "accepted_first_try": sum(len(row["tries"]) == 1 for row in accepted),
        "tokens": total("tokens"),
        "money": total("money"),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 1),
    }


def keep(out: Path, name: str, source: str) -> None:
    """Store an accepted kernel, to be judged and timed on a GPU later."""
    if source:
        kernels_of(out).mkdir(parents=True, exist_ok=True)
        (kernels_of(out) / f"{name}.py").write_text(source)


if __name__ == "__main__":
    sys.exit(main())
