"""A result beside the newest earlier one of the same thing."""

from __future__ import annotations

from typing import Any

import pytest

from onboarding.stages.throughput import stage
from onboarding.stages.throughput.report import Report
from onboarding.stages.throughput.result import ThroughputResult
from tests.api.story import align_result, architecture

GIB = 2**30


def result(
    ms: float, *, spread: float = 0.02, peak: float = 1.0, profile: str = "standard", **changes: Any
) -> ThroughputResult:
    """A run on a GPU whose steps took ``ms`` milliseconds, give or take ``spread``."""
    run = {
        "bundle": False, "times_ms": [ms, ms * (1 + spread), ms * (1 - spread)], "losses": [6.0, 5.0], "median_ms": ms,
        "flops_per_token": 2e10, "peak_bytes": int(peak * GIB), "kernels": 0,
        "breakdown": [{"label": "0", "layers": 2, "forward_ms": ms / 2, "backward_ms": ms / 2}],
    }  # fmt: skip
    align = align_result().model_copy(update={"device": "NVIDIA H200"})
    job = {"device": "cuda", "batch": 1, "sequence_length": 8192, "adapters": True}
    told = Report.model_validate({"sizes": {"layers": 2}, "layers": [0, 1], "runs": [run]})
    made = stage._result(architecture(), align, job, told, kernels=0, begun=0.0)
    return made.model_copy(update={"profile": profile, **changes})


def stored(*results: ThroughputResult) -> list[tuple[str, dict[str, Any]]]:
    """As the database has them, newest first."""
    return [(f"job{i}", made.model_dump(mode="json")) for i, made in enumerate(results)]


@pytest.mark.parametrize(
    ("ms", "spread", "peak", "words"),
    [
        (100.0, 0.02, 1.0, ""),
        (104.0, 0.02, 1.0, ""),  # 3.8 % fewer tokens a second
        (112.0, 0.02, 1.0, "11% fewer tokens a second"),
        (112.0, 0.2, 1.0, ""),  # its own steps are further apart
        (90.0, 0.02, 1.04, ""),
        (100.0, 0.02, 1.1, "10% more memory"),
        (125.0, 0.02, 1.5, "20% fewer tokens a second (5% is within the runs' spread); 50% more memory"),
    ],
)
def test_what_is_a_regression(ms: float, spread: float, peak: float, words: str) -> None:
    found = stage.beside(result(ms, spread=spread, peak=peak), stored(result(100.0)))
    assert found.baseline is not None
    (run,) = found.baseline.runs
    assert run.speed == pytest.approx(100 / ms)
    assert run.memory == pytest.approx(peak, rel=1e-6)
    assert words in run.regressed
    assert bool(run.regressed) is bool(words)
    assert found.summary.startswith("REGRESSION against job job0: without the bundle: ") is bool(words)


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": "quick"}, {"device": "NVIDIA H100"}, {"sequence_length": 4096}, {"sizes": {"layers": 3}},
        {"trained": "twin"}, {"adapters": False}, {"dtype": "float32"}, {"batch": 2},
    ],
)  # fmt: skip
def test_another_thing_is_no_baseline(changes: dict[str, Any]) -> None:
    same = result(100.0)
    assert stage.beside(result(150.0), stored(result(100.0, **changes))).baseline is None
    found = stage.beside(result(150.0), stored(result(100.0, **changes), same)).baseline
    assert found is not None
    assert found.job_id == "job1"


def test_a_regression_is_no_baseline_for_the_next_job() -> None:
    first = result(100.0)
    slower = stage.beside(result(110.0), stored(first))
    assert slower.baseline is not None
    assert slower.baseline.regressed
    third = stage.beside(result(111.0), stored(slower, first))
    assert third.baseline is not None
    assert (third.baseline.job_id, bool(third.baseline.regressed)) == ("job1", True)


def test_without_an_earlier_job_nothing_is_said() -> None:
    skipped = {"outcome": "skipped", "summary": "no GPU"}
    found = stage.beside(result(100.0), [("job0", skipped)])
    assert found.baseline is None
    assert found.summary == result(100.0).summary
