"""``python -m benchmarks.coverage``: sweep what has no row yet, then write the report.

--only TEXT     entries whose key contains it (repeatable); ``causal-lm/``, ``image-text-to-text/`` select a mapping
--again         measure again what failed; with --only, everything selected
--part parse    only the parse (or only ``twin``)
--report FILE   write the table (docs/coverage.md)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.coverage.entries import Entry, all_entries
from benchmarks.coverage.row import Row
from benchmarks.coverage.sweep import read_rows, sweep

RESULTS = Path("benchmarks/results/coverage.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every selected entry has a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage")
    parser.add_argument("--only", action="append", default=[], help="entries whose key contains this")
    parser.add_argument("--again", action="store_true", help="measure again what is incomplete")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    parser.add_argument("--part", choices=("parse", "twin", "roles"), action="append", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of an entry")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    known = read_rows(options.results)

    def wanted(entry: Entry) -> bool:
        if options.only and not any(text in f"{entry.key}$" for text in options.only):
            return False
        row = known.get(entry.key)
        missing = "roles" in options.part and row is not None and row.twin and not row.roles_claimed
        return row is None or options.fresh or (options.again and (missing or not row.complete))

    entries = all_entries()
    chosen = [entry for entry in entries if wanted(entry)]
    if chosen:
        from benchmarks.coverage.probe import PARTS, measure

        parts = tuple(options.part) or PARTS

        def run(entry: Entry) -> Row:
            row = known.get(entry.key)
            if row is None or options.fresh or options.part:
                return measure(entry, parts, row)
            return measure(entry, row.incomplete, row)  # --again: what was shown need not be shown again

        sweep(chosen, options.results, run, jobs=options.jobs, seconds=options.seconds, known=known, report=_say)
    if options.report:
        from benchmarks.coverage.report import write_report

        write_report(read_rows(options.results), entries, options.report)
    return 0


def _say(row: Row) -> None:
    marks = "".join("-" if ok is None else "x" if ok else "." for ok in _marks(row))
    reason = row.problem or row.twin_problem or {}
    text = f"{reason.get('title', '')} {reason.get('detail', '')}".strip()
    print(f"{marks} {row.seconds:6.1f} {row.twin_seconds:6.1f} {row.key} {text[:300]}", file=sys.stdout, flush=True)


def _marks(row: Row) -> tuple[bool | None, ...]:
    return row.instantiates, row.forward, row.backward, row.tower, row.twin


if __name__ == "__main__":
    sys.exit(main())
