"""The run before this one: what of this one is slower or larger than it was. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from onboarding.stages.throughput.result import Baseline, Compared, ThroughputResult, Training

SLOWER = 0.05
"""Loss of tokens a second that counts, where the runs' own spread is not larger."""
LARGER = 0.05
"""Growth of peak memory that counts."""


def compared(result: ThroughputResult, earlier: Iterable[tuple[str, dict[str, Any]]]) -> Baseline | None:
    """This result beside the newest one that measured the same thing; None where there is none.

    A result that had regressed itself is passed over: it would make its own loss the norm.

    Args:
        result: of this job.
        earlier: job id and stored result, of the same definition, newest first.
    """
    for job_id, data in earlier:
        try:
            before = ThroughputResult.model_validate(data)
        except ValidationError:  # a skipped stage, or a result of an older version
            continue
        if _what(before) != _what(result) or (before.baseline is not None and before.baseline.regressed):
            continue
        runs = [
            _compare(run, old)
            for run in result.runs
            for old in before.runs
            if (old.name, old.steps > 0) == (run.name, True)
        ]
        if runs:
            return Baseline(job_id=job_id, runs=runs)
    return None


def _what(result: ThroughputResult) -> tuple[Any, ...]:
    """What must be equal for two results to be of the same thing."""
    return (
        result.profile, result.trained, result.device, result.dtype, result.adapters, result.batch,
        result.sequence_length, tuple(sorted(result.sizes.items())),
    )  # fmt: skip


def _compare(now: Training, before: Training) -> Compared:
    speed = now.tokens_per_second / before.tokens_per_second
    memory = now.peak_bytes / before.peak_bytes if before.peak_bytes else 1.0
    allowed = max(SLOWER, spread(now), spread(before))
    found = []
    if speed < 1 - allowed:
        found.append(f"{1 - speed:.0%} fewer tokens a second ({allowed:.0%} is within the runs' spread)")
    if memory > 1 + LARGER:
        found.append(f"{memory - 1:.0%} more memory")
    return Compared(name=now.name, speed=speed, memory=memory, allowed=allowed, regressed="; ".join(found))


def spread(run: Training) -> float:
    """Half of what lies between the fastest and the slowest step, as a share of the median."""
    return (run.slowest_ms - run.fastest_ms) / 2 / run.step_ms
