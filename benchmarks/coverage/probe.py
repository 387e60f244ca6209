"""Measuring one entry, in a process of its own."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from benchmarks.coverage.entries import Entry
from benchmarks.coverage.row import Row
from onboarding.problem import Problem
from onboarding.stages.parse.analyse import analyse

TOKENS = 4096


PARTS = ("parse", "twin", "roles")


def measure(entry: Entry, parts: tuple[str, ...] = PARTS, known: Row | None = None) -> Row:
    """Parse the entry's default configuration, train its twin, prove its roles.

    Args:
        entry: what to measure.
        parts: which of :data:`PARTS`.
        known: an earlier row, whose other parts are kept.
    """
    torch.set_num_threads(1)
    new = Row(mapping=entry.mapping, model_type=entry.model_type, class_name=entry.class_name)
    row = copy.deepcopy(known) if known is not None else new
    if "parse" in parts:
        row.problem, row.instantiates, row.forward, row.backward, row.tower = None, False, False, False, None
        _parse(entry, row)
    if "twin" in parts:
        row.twin, row.twin_problem, row.twin_losses = False, None, None
        _twin(entry, row)
    if "roles" in parts and row.twin:
        _roles(entry, row)
    return row


def _problem(error: Exception) -> dict[str, Any]:
    if isinstance(error, Problem):
        return error.to_dict()
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "type": "unexpected",
        "title": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        "detail": f"{frame.filename.rpartition('/')[2]}:{frame.lineno} in {frame.name}",
    }


def _parse(entry: Entry, row: Row) -> None:
    started = time.monotonic()
    try:
        parsed = analyse(entry.config, tokens=TOKENS, name=entry.model_type, assume=True)
    except Exception as error:  # the sweep goes on whatever an entry does
        row.problem = _problem(error)
        row.instantiates = row.problem.get("type", "").endswith("model-not-traced")
    else:
        architecture = parsed.architecture
        row.instantiates = row.forward = True
        row.backward = parsed.trace.backward
        row.tower = parsed.trace.tower
        row.total = architecture.census.total
        row.tower_parameters = sum(architecture.census.by_role.get(r, 0) for r in ("vision tower", "audio tower"))
        row.layers, row.kinds = architecture.num_layers, len(architecture.blocks)
        row.novel = list(architecture.novel)
        row.warnings = list(architecture.warnings)
    row.seconds = round(time.monotonic() - started, 2)


def _roles(entry: Entry, row: Row) -> None:
    from onboarding.stages.parse.understand.prove import understand

    started = time.monotonic()
    found = understand(entry.config)
    row.roles_claimed = len(found.proofs)
    row.roles_proven = sum(proof.proven for proof in found.proofs)
    row.roles_seconds = round(time.monotonic() - started, 2)


def _twin(entry: Entry, row: Row) -> None:
    from onboarding.twin import derive
    from onboarding.twin.learn import learn

    started = time.monotonic()
    try:
        plan = derive(entry.config, assume=True)
        learned = learn(plan)
        row.twin_parameters = int(plan.sizes["parameters"])
        row.twin_losses = (round(learned.losses[0], 4), round(learned.losses[-1], 4))
        row.twin = learned.good
        if not learned.good:
            row.twin_problem = {"type": "twin-does-not-learn", "title": "", "detail": learned.reason}
    except Exception as error:
        row.twin_problem = _problem(error)
    row.twin_seconds = round(time.monotonic() - started, 2)
