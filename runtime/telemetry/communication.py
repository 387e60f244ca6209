"""Time of collectives in one step, and how much of it nothing hides: read from a profile of that step.

A collective is *exposed* where no computation runs at the same time. On a GPU both are kernels on its streams; on a CPU
gloo works in threads of its own, and there only the total is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
T = TypeVar("T")
COLLECTIVE = ("nccl", "gloo:")


def profiled(step: Callable[[], T], device: torch.device) -> tuple[T, dict[str, float]]:
    """Run a step under the profiler.

    Returns:
        The step's result, and seconds: ``communication``, and on a GPU ``exposed_communication`` and ``computation``.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as session:
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result, seconds(session.events() or [], device.type)


def seconds(events: Iterable[Any], device_type: str) -> dict[str, float]:
    """Sum up a profile's events (times in microseconds)."""
    collectives: list[Interval] = []
    kernels: list[Interval] = []
    for event in events:
        span = (float(event.time_range.start), float(event.time_range.end))
        if any(word in event.name.lower() for word in COLLECTIVE):
            if device_type == "cpu" or "cuda" in str(event.device_type).lower():
                collectives.append(span)
        elif device_type == "cuda" and "cuda" in str(event.device_type).lower():
            kernels.append(span)
    merged = union(collectives)
    found = {"communication": length(merged) / 1e6}
    if device_type == "cuda":
        busy = union(kernels)
        found["exposed_communication"] = (length(merged) - overlap(merged, busy)) / 1e6
        found["computation"] = length(busy) / 1e6
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, ascending."""
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def length(disjoint: Iterable[Interval]) -> float:
    """Of disjoint intervals together."""
    return sum(end - begin for begin, end in disjoint)


def overlap(one: list[Interval], other: list[Interval]) -> float:
    """Length of what two lists of disjoint intervals share."""
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared
