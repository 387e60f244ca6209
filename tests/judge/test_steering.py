"""Sizes and values that a candidate's own numbers lead to; what is drawn can tell, or is replaced."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from planting import KDA, MOE, NORM, candidate, make_spec

from kernel_templates.registry import family_module
from onboarding.stages.judge import bounds, oracle, steering, trials, verify
from onboarding.stages.judge.oracle import Call, Expected
from onboarding.stages.judge.steering import Numbers


def test_numbers_are_read_with_constant_expressions_folded() -> None:
    source = b"""
SPEC = {"hidden": 777}
LIMIT = 1 << 13
def forward(x):
    if x.numel() > 70 * 70 + 100:
        return -8.5 * x
    return x[:12]
"""
    found = steering.numbers_in(source)
    assert found.sizes[0] == 5000  # of a comparison: first
    assert {8192, 12} <= set(found.sizes)
    assert 777 not in found.sizes
    assert 8.5 in found.values
    assert steering.numbers_in(b"def f(:") == Numbers()


@pytest.mark.parametrize(
    ("family", "flags", "name"),
    [
        ("norm", NORM | {"hidden": 2304}, "hidden"),
        ("gated_activation", {"width": 9216}, "width"),
        ("moe", MOE | {"experts": 64}, "experts"),
        ("linear_attention", KDA | {"key_dim": 128}, "key_dim"),
    ],
)
def test_published_sizes_and_many_rows_are_tried(family: str, flags: dict[str, Any], name: str) -> None:
    spec = make_spec(family, flags)
    rng = random.Random(0)
    known = family_module(family, "cases").cases(spec, rng, 20, "interpreted")
    found = steering.cases(spec, known, 6, Numbers(sizes=(1717,)), "interpreted", rng)
    assert any(case.dims[name] == spec.dims()[name] for case in found)
    growing = next(n for n in ("rows", "tokens", "length") if n in found[0].dims)
    largest = max(case.dims[growing] for case in known[:6])
    assert max(case.dims[growing] for case in found) > largest
    if family in ("norm", "gated_activation"):
        assert max(case.dims[growing] for case in found) > 5000
        assert any(1717 in case.dims.values() for case in found)
        assert steering.beyond(spec, Numbers(sizes=(10**6, 1717)), "interpreted") == [10**6]


@pytest.mark.parametrize("seed", range(20))
def test_planted_values_span_magnitudes_and_stay_in_the_domain(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor | None] = {
        "free": 0.3 * torch.randn(96, generator=generator),
        "negative": -torch.rand(96, generator=generator) - 1.0,
        "probability": torch.rand(96, generator=generator),
        "normed": torch.nn.functional.normalize(torch.randn(8, 12, generator=generator), dim=-1),
        "absent": None,
    }
    changed = {}
    for turn in range(4):
        found, words = steering.spread(tensors, turn, (8.0,), random.Random(seed), generator)
        name = words.removeprefix("wide values of ")
        changed[name] = found[name]
        assert all(found[n] is tensors[n] for n in tensors if n != name)
    free, negative, probability, normed = (changed[n] for n in ("free", "negative", "probability", "normed"))
    assert free is not None
    assert negative is not None
    assert probability is not None
    assert normed is not None
    assert free.max() > 8
    assert free.min() < -8
    assert negative.max() <= -1.0
    assert negative.min() < -8
    assert probability.min() >= 0
    assert probability.max() <= 1
    assert normed.norm(dim=-1).max() < 1.03


def test_void_cases_are_replaced_and_everything_is_told() -> None:
    for family, flags in (("norm", NORM), ("gated_activation", {"width": 100})):
        spec = make_spec(family, flags)
        for seed in range(2):
            tally = trials.Tally()
            drawn = list(trials.draw(spec, 4, "interpreted", torch.device("cpu"), seed, tally=tally))
            assert len(drawn) >= 4
            assert all(trial.conclusive and trial.well_posed for trial in drawn)
            assert not tally.untold
            names = {"y"} | {f"grad {role.name}" for role in spec.inputs() if role.differentiable}
            assert set(tally.told) == tally.settled == names


def test_a_case_whose_values_cannot_tell_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("norm", NORM)
    calls = iter(range(10**6))
    real = oracle.sensitivity

    def blind_at_first(expected: Expected, call: Call) -> float | None:
        return 0.5 if next(calls) < 4 * trials.DRAWS else real(expected, call)

    monkeypatch.setattr(oracle, "sensitivity", blind_at_first)
    tally = trials.Tally()
    drawn = list(trials.draw(spec, 3, "interpreted", torch.device("cpu"), 5, tally=tally))
    assert tally.void == 1
    assert len(drawn) >= 3
    assert all(trial.conclusive for trial in drawn)


def test_a_right_result_that_equals_an_input_is_no_impostor() -> None:
    value = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = Expected(name="y", value=value, dtype=torch.float32, reference_error=0.0, limit=1e-5)
    call = Call(spec=make_spec("norm", NORM), tensors={"x": value}, upstream={}, needs=frozenset())
    assert (oracle.sensitivity(expected, call) or 0) > 1
    near = dataclasses.replace(call, tensors={"x": value * (1 + 1e-6)})
    assert (oracle.sensitivity(expected, near) or 0) < 1


def test_a_block_map_shows_where_a_result_is_off() -> None:
    value = torch.ones(64, 32, dtype=torch.float64)
    expected = Expected(name="y", value=value, dtype=torch.float32, reference_error=0.0, limit=0.1)
    actual = value.clone()
    actual[:8, -4:] += 0.2  # twice the limit, in the upper right corner
    grid = verify.block_map(expected, actual)
    assert len(grid) == 8
    assert grid[0][7] == pytest.approx(2.0)
    assert sum(x > 0 for row in grid for x in row) == 1


def test_bounds_know_masks_of_integers_and_accesses_that_touch_two_tensors() -> None:
    import numpy as np

    a, b = torch.zeros(8), torch.zeros(8)
    bounds._running = bounds.extents([a, b, 3, None])
    try:
        at = np.array([a.data_ptr() + 4 * i for i in range(9)], np.uint64)
        bounds.check(at, np.array([1] * 8 + [0], np.int32), 4, "reads")
        both = np.array([a.data_ptr(), b.data_ptr() + 28], np.uint64)
        bounds.check(both, np.ones(2, bool), 4, "reads")
        with pytest.raises(bounds.OutOfBoundsError, match=r"writes 0 bytes past the end of a tensor of shape \[8\]"):
            bounds.check(np.array([b.data_ptr() + 32], np.uint64), np.ones(1, bool), 4, "writes")
    finally:
        bounds._running = None


def test_the_shipped_candidates_name_no_size_that_is_not_tried() -> None:
    for family, flags in (("gated_activation", {"width": 100}), ("linear_attention", KDA)):
        spec = make_spec(family, flags)
        assert steering.beyond(spec, steering.numbers_in(candidate(spec)), "interpreted") == []


@pytest.mark.parametrize("elements", [1717 * 96, 250_000])
def test_numbers_of_elements_are_met(elements: int) -> None:
    spec = make_spec("norm", NORM)
    known = family_module("norm", "cases").cases(spec, random.Random(0), 20, "interpreted")
    found = steering.cases(spec, known, 2, Numbers(sizes=(elements,)), "interpreted", random.Random(0))
    counts = {case.dims["rows"] * case.dims["heads"] * case.dims["hidden"] for case in found}
    assert min(count for count in counts if count >= elements) < elements + 96
    assert (elements in counts) == (elements % 96 == 0)
    moe = make_spec("moe", MOE)
    known = family_module("moe", "cases").cases(moe, random.Random(0), 20, "interpreted")
    found = steering.cases(moe, known, 2, Numbers(sizes=(elements,)), "interpreted", random.Random(0))
    assert max(case.dims["tokens"] for case in found) <= 400  # more would take minutes
