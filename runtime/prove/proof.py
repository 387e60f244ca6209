"""Run cases over this group's ranks, compare each with one process, show a table."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from runtime.prove.case import Case
from runtime.prove.compare import Difference, compare
from runtime.prove.run import SEED, Outcome, run

NEIGHBOURS = (8, 9, 10)
"""Seeds of further data, for the error that one process makes in low precision."""

Row = tuple[Case, Difference, float]
_HEAD = ["twin", "dtype", "layout", "trains", "", "balance", "data", "loss", "norm", "gradient", "weight", "s", "worst"]


def prove(cases: list[Case], show: bool) -> list[Row]:
    """Run every case on this group's ranks; rank 0 also runs the references and compares."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known: dict[tuple[object, ...], Outcome] = {}

    def alone(case: Case, dtype: torch.dtype, seed: int = SEED) -> Outcome:
        key = (case.twin, case.lora, case.data, case.layout.balance, dtype, seed)
        if key not in known:
            known[key] = run(case, ranks, alone=True, dtype=dtype, seed=seed)
        return known[key]

    rows: list[Row] = []
    if show and rank == 0:
        _print_row(_HEAD)
    for case in cases:
        start = time.perf_counter()
        actual = run(case, ranks, alone=False)
        gc.collect()  # a model and its hooks refer to each other
        if rank:
            continue
        dtype = getattr(torch, case.dtype)
        expected = alone(case, torch.float64)
        seeds = [] if case.dtype == "float64" else [SEED, *NEIGHBOURS]
        own = [(alone(case, dtype, seed), alone(case, torch.float64, seed)) for seed in seeds]
        difference = compare(actual, expected, own, dtype)
        rows.append((case, difference, time.perf_counter() - start))
        if show:
            _print_case(*rows[-1])
    return rows


def _print_case(case: Case, found: Difference, seconds: float) -> None:
    errors = [f"{e:.1e}" for e in (found.loss, found.norm, found.gradient, found.weight)]
    _print_row([*case.words, *errors, f"{seconds:.1f}", ("" if found.ok else "DIFFERS ") + found.worst])


def _print_row(cells: list[str]) -> None:
    widths = [12, 9, 22, 7, 10, 9, 7, 8, 8, 9, 8, 5, 0]
    print(" ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)
