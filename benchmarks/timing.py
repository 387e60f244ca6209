"""Interleaved timing: contestants take turns, the cache is flushed before each call, medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 256 * 2**20
"""Several times the 50 MB of an H200's L2."""
MIN_ROUNDS, MAX_ROUNDS = 3, 60
SECONDS = 1.0
"""Time that all rounds of one contestant should take; a peer of a second a call would take a minute of seven rounds."""


@dataclass
class Contestant:
    """One implementation on one set of inputs."""

    name: str
    call: Callable[[], Tensor]
    forward_ms: list[float] = field(default_factory=list)
    both_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    first_s: float = 0.0
    """The first forward and backward: compilation and any tuning."""


def prepare(contestant: Contestant, leaves: list[Tensor], upstream: Tensor) -> None:
    """First call and peak memory above the inputs; raises what the implementation raises."""
    start = time.perf_counter()
    _both(contestant, leaves, upstream)
    _synchronise()
    contestant.first_s = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        _both(contestant, leaves, upstream)
        _synchronise()
        contestant.peak_gib = (torch.cuda.max_memory_allocated() - base) / 2**30


def race(contestants: list[Contestant], leaves: list[Tensor], upstream: Tensor) -> None:
    """Fill the contestants' times: forward without a graph, and forward with backward."""
    flush = torch.empty(FLUSH_BYTES if torch.cuda.is_available() else 1, dtype=torch.uint8, device=upstream.device)
    both = [partial(_both, contestant, leaves, upstream) for contestant in contestants]
    estimate = max(*(_once(call, flush) for call in both), 1e-3)
    rounds = min(max(int(SECONDS * 1e3 / estimate), MIN_ROUNDS), MAX_ROUNDS)
    if not torch.cuda.is_available():
        rounds = 1
    for _ in range(rounds):
        for contestant, call in zip(contestants, both, strict=True):
            with torch.no_grad():
                contestant.forward_ms.append(_once(contestant.call, flush))
            contestant.both_ms.append(_once(call, flush))


def median(values: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(values)


def _both(contestant: Contestant, leaves: list[Tensor], upstream: Tensor) -> None:
    torch.autograd.grad(contestant.call(), leaves, upstream)


def _once(call: Callable[[], object], flush: Tensor) -> float:
    """Milliseconds of one call, by CUDA events where there is a GPU."""
    flush.zero_()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
