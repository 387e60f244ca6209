"""``python -m runtime.prove``: train twins over ranks and in one process, compare, exit 1 on a difference."""

from __future__ import annotations

import argparse
import sys
import time

from runtime.prove.case import matrix, quick
from runtime.prove.group import run_ranks
from runtime.prove.proof import Row, prove


def main() -> None:
    """Parse the command line, run, summarise."""
    parser = argparse.ArgumentParser(prog="python -m runtime.prove", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="processes on this machine (default 4)")
    parser.add_argument("--quick", action="store_true", help="a few rows instead of the whole matrix")
    parser.add_argument("--only", default="", help="rows whose words contain this")
    given = parser.parse_args()
    cases = quick(given.ranks) if given.quick else matrix(given.ranks)
    cases = [case for case in cases if given.only in " ".join(case.words)]
    if not cases:
        parser.error(f"no row contains {given.only!r}")
    start = time.perf_counter()
    rows: list[Row] = run_ranks(given.ranks, prove, cases, True)
    different = [row for row in rows if not row[1].ok]
    print(
        f"{len(rows)} cases on {given.ranks} ranks in {time.perf_counter() - start:.0f} s: "
        f"{len(rows) - len(different)} equal, {len(different)} different"
    )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
