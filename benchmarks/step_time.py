"""``python -m benchmarks.step_time [--only NAME] [--write]``: the step-time model's errors on published runs, held out.

Prints a table for each protocol, stored as JSON in ``benchmarks/results/step-time.json``; every held-out run, with
its prediction, is a line of ``step-time-runs.jsonl`` beside it. With ``--write`` the fit on all runs and the errors
become the package's own data (``onboarding/step_time/fitted.json``), which projections read. Takes about two minutes on
one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import onboarding.step_time
from benchmarks.run import commit
from onboarding.step_time.fit import SCALES, fit
from onboarding.step_time.law import plain
from onboarding.step_time.published import published
from onboarding.step_time.validate import GROUPS, PROTOCOLS, Judged, by_group, judge, summary

RESULTS = Path(__file__).parent / "results" / "step-time.json"
ROWS = RESULTS.with_name("step-time-runs.jsonl")
FITTED = Path(onboarding.step_time.__file__).parent / "fitted.json"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; the errors are what they are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument("--only", default="", help="protocols whose name contains this")
    parser.add_argument("--write", action="store_true", help="store the fit and the errors as package data")
    options = parser.parse_args(arguments)
    runs = published()
    judged: list[dict[str, Any]] = []
    record: dict[str, Any] = {"commit": commit(), "runs": len(runs), "protocols": {}}
    for protocol in PROTOCOLS:
        if options.only not in protocol.name:
            continue
        rows = judge(runs, protocol, lambda held: print(".", end="", file=sys.stderr, flush=True))
        print(file=sys.stderr)
        found = {name: by_group(rows, key) for name, key in GROUPS.items()}
        whole = summary(rows)
        judged += [{"protocol": protocol.name, **_row(row)} for row in rows]
        record["protocols"][protocol.name] = {
            "words": protocol.words,
            "wanted": protocol.limits,
            "all": whole,
            **found,
        }
        print(f"\n{protocol.name}: {protocol.words}")
        print(_line("all", whole))
        for group, table in found.items():
            for name, row in table.items():
                print(_line(f"  {group} {name}", row))
    if not options.only:
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in judged))
    if options.write:
        fitted = fit(runs)
        errors = {name: entry["all"] for name, entry in record["protocols"].items()}
        scales = {name: round(float(value), 5) for name, value in zip(SCALES, np.exp(fitted.scales), strict=True)}
        data = {"runs": len(runs), "parameters": plain(fitted.logs), "effects": scales, "errors": errors}
        FITTED.write_text(json.dumps(data, indent=1) + "\n")
    return 0


def _row(row: Judged) -> dict[str, Any]:
    s = row.run.setting
    return {
        "stack": row.run.stack,
        "release": row.run.release,
        "task": row.run.task,
        "mode": row.run.mode,
        "model": s.work.name,
        "system": s.system.key,
        "precision": s.precision,
        "layout": dict(
            zip(("gpus", "gbs", "mbs", "seq", "fsdp", "tp", "pp", "cp", "vp", "ep"), row.run.layout, strict=True)
        ),
        "step_s": round(row.run.step_s, 4),
        "predicted_s": round(row.predicted_s, 4),
        "error": round(row.error, 4),
    }


def _line(name: str, row: dict[str, Any]) -> str:
    rank = "" if row["rank"] is None else f"{row['rank']:.2f}"
    errors = "  ".join(f"{word} {100 * row[word]:5.1f} %" for word in ("median", "p90", "worst"))
    return f"{name:<34}{row['runs']:>4} runs  {errors}  rank {rank}"


if __name__ == "__main__":
    sys.exit(main())
