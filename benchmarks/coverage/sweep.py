"""Running entries, each in a forked child with time and memory limits; results are appended line by line.

The parent imports torch and transformers once and then only forks and waits, so that a child costs a few milliseconds
and a crash, a hang or a memory hog costs one row.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from benchmarks.coverage.entries import Entry
from benchmarks.coverage.row import Row


class _Child(NamedTuple):
    entry: Entry
    process: BaseProcess
    pipe: Connection
    deadline: float


def read_rows(path: Path) -> dict[str, Row]:
    """The last row of each key in a results file; empty if there is none."""
    if not path.exists():
        return {}
    rows = (Row.from_json(line) for line in path.read_text().splitlines() if line.strip())
    return {row.key: row for row in rows}


def sweep(
    entries: Iterable[Entry],
    results: Path,
    measure: Callable[[Entry], Row],
    *,
    jobs: int = 1,
    seconds: float = 180.0,
    gigabytes: float = 12.0,
    known: Mapping[str, Row] | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> None:
    """Measure entries and append each row to the results file as soon as it is known.

    Args:
        entries: what to run, in this order.
        results: JSON lines.
        measure: runs in the child.
        jobs: children side by side.
        seconds: a child's time limit.
        gigabytes: a child's address space.
        known: earlier rows by key; one that gives no answer this time stays as it was, with the reason added.
        report: called with each row.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(entries)[::-1], list[_Child]()
    results.parent.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            entry = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, measure, entry, gigabytes))
            process.start()
            theirs.close()
            running.append(_Child(entry, process, ours, time.monotonic() + seconds))
        left = min(child.deadline for child in running) - time.monotonic()
        ready = wait([child.pipe for child in running], timeout=max(left, 0.0))
        for child in list(running):
            row = _finished(child, child.pipe in ready, seconds, (known or {}).get(child.entry.key))
            if row is not None:
                running.remove(child)
                with results.open("a") as file:
                    file.write(row.to_json() + "\n")
                report(row)


def _child(pipe: Connection, measure: Callable[[Entry], Row], entry: Entry, gigabytes: float) -> None:
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send(measure(entry).to_json())


def _finished(child: _Child, ready: bool, seconds: float, known: Row | None) -> Row | None:
    """The row of a child that has answered, died or run out of time; None while it works."""
    text, reason = "", ""
    if ready:
        try:
            text = child.pipe.recv()
        except EOFError:
            child.process.join()
            reason = f"the process ended with exit code {child.process.exitcode}"
    elif time.monotonic() >= child.deadline:
        child.process.kill()
        reason = f"not done after {seconds:.0f} s"
    else:
        return None
    child.process.join()
    child.pipe.close()
    if text:
        return Row.from_json(text)
    entry = child.entry
    row = known or Row(mapping=entry.mapping, model_type=entry.model_type, class_name=entry.class_name)
    problem = {"type": "no-answer", "title": reason, "detail": ""}
    return dataclasses.replace(
        row,
        problem=row.problem if row.forward else problem,
        twin_problem=row.twin_problem if row.twin else problem,
    )
