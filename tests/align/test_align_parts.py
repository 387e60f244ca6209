"""The parts of alignment, each against values from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from onboarding.stages.align import bisect, compare, curves
from onboarding.stages.align.result import LayerError
from onboarding.stages.align.widen import widened


@pytest.mark.parametrize(
    ("freedom", "critical"),
    # two-sided 5 % points of Student's t, from the usual printed table
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (30, 2.042)],
)
def test_students_t_matches_the_printed_table(freedom: int, critical: float) -> None:
    assert curves.student_two_sided(critical, freedom) == pytest.approx(0.05, abs=5e-5)
    assert curves.student_two_sided(0.0, freedom) == pytest.approx(1.0)


def test_p_value_is_small_for_a_shift_and_large_for_one_more_run() -> None:
    runs = [[3.0, 2.0, 1.0 + d] for d in (-1e-6, 0.0, 1e-6, 2e-6)]
    assert curves.p_value([3.0, 2.0, 1.0 + 5e-7], runs) > 0.9
    assert curves.p_value([3.1, 2.1, 1.1], runs) < 1e-6
    assert curves.p_value(runs[0], [runs[0]] * 3) == 1.0
    # runs that agree to the last bit: one unit in the last place is no evidence, a thousand are
    assert curves.p_value([4.0 * (1 + 2.0**-23)], [[4.0]] * 3) > 0.3
    assert curves.p_value([4.0 * (1 + 2.0**-13)], [[4.0]] * 3) < 1e-4
    with pytest.raises(ValueError, match="two runs"):
        curves.p_value(runs[0], runs[:1])


def test_the_band_is_the_widest_difference_so_far_and_never_below_the_floor() -> None:
    runs = [[4.0, 3.0, 2.0, 1.0], [4.0, 3.2, 2.1, 1.0], [4.0, 2.9, 2.0, 1.0]]
    widths = curves.band(runs, floor=0.01)
    assert widths == pytest.approx([0.04, 0.45, 0.45, 0.45])
    assert curves.inside([4.03, 3.4, 2.4, 1.4], runs[0], widths)
    assert not curves.inside([4.05, 3.0, 2.0, 1.0], runs[0], widths)
    assert not curves.inside([4.0, 3.0, 2.0, math.nan], runs[0], widths)


def row(actual: torch.Tensor | None, low: torch.Tensor, high: torch.Tensor) -> LayerError:
    candidate = {} if actual is None else {"output.model.layers.1": actual}
    (found,) = compare.compare_layers(
        candidate, [{"output.model.layers.1": low}], {"output.model.layers.1": high}, torch.float32, ["K", "M"]
    )
    return found


def test_errors_are_relative_to_the_tensors_rms_and_judged_by_the_references_own() -> None:
    high = torch.full((1000,), 2.0, dtype=torch.float64)
    low = high * (1 + 1e-3)
    found = row(high * (1 + 3e-3), low, high)
    assert (found.layer, found.block, found.kind) == (1, "M", "output")
    assert found.rms == pytest.approx(3e-3)
    assert found.p50 == found.p99 == pytest.approx(3e-3)
    assert found.tolerance == pytest.approx(1.5e-3)
    assert found.share == pytest.approx(2.0)
    spiked = high.clone()
    spiked[0] += 2.0
    one = row(spiked, low, high)
    assert (one.p50, one.maximum) == (0.0, pytest.approx(1.0))  # type: ignore[comparison-overlap]
    assert one.rms == pytest.approx(math.sqrt(1 / 1000))


def test_missing_wrongly_shaped_and_non_finite_tensors_fail() -> None:
    high = torch.ones(8, dtype=torch.float64)
    for bad in (None, torch.ones(7), torch.full((8,), math.nan), torch.full((8,), math.inf)):
        assert row(bad, high, high).share > 1e6


def test_a_gradient_that_the_reference_does_not_have_fails() -> None:
    rows = compare.compare_layers({"gradient.w": torch.ones(2)}, [{}], {}, torch.float32, [])
    assert [r.share > 1 for r in rows] == [True]


def test_tokens_that_went_elsewhere_are_counted() -> None:
    high = {"output.layers.0.experts.choice": torch.tensor([[0, 1], [2, 3], [1, 2]])}
    other = {"output.layers.0.experts.choice": torch.tensor([[0, 1], [2, 4], [1, 3]])}
    assert compare.choices_differ(other, high) == 2
    assert compare.choices_differ(high, high) == 0


@pytest.mark.parametrize("guilty", [{"a"}, {"e"}, {"b", "d"}, set("abcde")])
def test_bisection_finds_every_culprit(guilty: set[str]) -> None:
    tries: list[Sequence[str]] = []

    def fails(part: Sequence[str]) -> bool:
        tries.append(part)
        return bool(guilty & set(part))

    assert bisect.culprits(["a", "b", "c", "d", "e"], fails) == sorted(guilty)
    assert len(tries) <= 8


def test_a_fault_that_needs_two_kernels_blames_both() -> None:
    assert bisect.culprits(["a", "b", "c"], lambda part: {"a", "c"} <= set(part)) == ["a", "b", "c"]


def test_widened_code_computes_in_float64() -> None:
    x = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with widened():
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(2).dtype == torch.float64
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
        norm = x.float().pow(2).mean().rsqrt()
    assert norm.item() == pytest.approx(1 / math.sqrt(sum(v * v for v in x.tolist()) / 64), rel=1e-15)
    assert torch.ones(2).dtype == torch.float32
    assert x.float().dtype == torch.float32
