"""The tolerance table and the comparison."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.registry import FAMILIES
from kernel_templates.rounding import rounded

BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def test_relative_rms_by_hand():
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    # errors 0.3 and 0.4: sqrt(0.25 / 25)
    assert tolerance.relative_rms(torch.tensor([3.3, 4.4], dtype=torch.float64), expected) == pytest.approx(0.1)
    assert tolerance.relative_rms(expected, expected) == 0.0
    assert tolerance.relative_rms(-expected, expected) == pytest.approx(2.0)
    assert tolerance.relative_rms(torch.zeros(2), expected) == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e200])
def test_magnitude_does_not_matter(scale):
    expected = torch.tensor([3.0, -4.0], dtype=torch.float64) * scale
    assert tolerance.relative_rms(expected * 1.125, expected) == pytest.approx(0.125)


def test_nothing_to_compare():
    assert tolerance.assert_close("x", torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64), 0.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_anything_not_finite_fails_and_is_located(bad):
    expected = torch.ones(2, 3, dtype=torch.float64)
    actual = expected.clone()
    actual[1, 2] = bad
    with pytest.raises(AssertionError, match=r"y: relative RMS error inf exceeds 1\.000e\+03; worst at \[1, 2\]"):
        tolerance.assert_close("y", actual, expected, 1e3)
    # infinities do not cancel, and a reference that is not finite proves nothing
    assert tolerance.relative_rms(actual, actual) == math.inf


def test_a_zero_reference_is_met_only_by_zeros():
    zero = torch.zeros(4, dtype=torch.float64)
    assert tolerance.relative_rms(torch.zeros(4), zero) == 0.0
    assert tolerance.relative_rms(torch.full((4,), 1e-30), zero) == math.inf


def test_worst_index_and_values_are_reported():
    expected = torch.ones(2, 2, dtype=torch.float64)
    actual = torch.tensor([[1.0, 1.5], [1.0, 1.0]])
    with pytest.raises(AssertionError, match=r"worst at \[0, 1\]: 1\.5 instead of 1"):
        tolerance.assert_close("grad w", actual, expected, 1e-3)


def test_shapes_must_match():
    with pytest.raises(AssertionError, match=r"o: shape \(2,\) is not the expected \(3,\)"):
        tolerance.assert_close("o", torch.zeros(2), torch.zeros(3, dtype=torch.float64), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floor_is_one_rounding(dtype):
    """On the unluckiest binade, values just above a power of two, one honest rounding stays below the floor."""
    generator = torch.Generator().manual_seed(0)
    ulp = 2.0 ** (1 - BITS[dtype])
    exact = 1.0 + ulp * torch.rand(200_000, generator=generator, dtype=torch.float64)
    once = tolerance.relative_rms(exact.to(dtype), exact)
    assert once == pytest.approx(ulp / math.sqrt(12), rel=0.02)
    assert 0.85 < once / tolerance.FLOORS[dtype] < 1.0


def test_floor_of_fp32_holds_a_long_sequential_sum():
    """The random walk of the table's derivation, simulated: u sqrt(n) / sqrt(6) at n = 20,000."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(20_000, 400, generator=generator)
    total = torch.zeros(400)
    for row in terms:
        total += row
    error = tolerance.relative_rms(total, terms.double().sum(0))
    predicted = 2.0**-24 * math.sqrt(20_000 / 6)
    assert 0.3 * predicted < error < 3 * predicted
    assert error < tolerance.FLOORS[torch.float32]


def test_limit_follows_the_rounded_reference_up_to_the_cap():
    bf16 = torch.bfloat16
    assert tolerance.limit("linear_attention", bf16, 4e-3) == pytest.approx(6e-3)
    assert tolerance.limit("linear_attention", bf16, 1e-5) == tolerance.FLOORS[bf16]
    # an algorithm cannot buy itself room: outputs 8e-3, gradients 1e-2, decay and beta 2e-2
    for gradient_of, cap in ((None, 8e-3), ("q", 1e-2), ("g", 2e-2), ("beta", 2e-2)):
        for claimed in (1.0, math.inf, math.nan):
            assert tolerance.limit("linear_attention", bf16, claimed, gradient_of) == pytest.approx(1.5 * cap)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", list(BITS))
def test_the_widest_limit_still_sees_gross_errors(family, dtype):
    """Zeros, a constant, a flipped sign and half the mantissa fail at the largest limit that a family can have.

    Only the gradients of decay and beta have a cap so wide that half the mantissa may pass: there the judge needs a
    rounded reference that stays below its cap, or voids the case.
    """
    exact = torch.randn(50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    widest = max(tolerance.limit(family, dtype, math.inf, g) for g in (None, "x"))
    assert tolerance.limit(family, dtype, math.inf, "g") < 0.1
    step = 2.0 ** -(BITS[dtype] // 2)
    mantissa, exponent = torch.frexp(exact)
    half = torch.ldexp((mantissa / step).round() * step, exponent)
    for wrong in (torch.zeros_like(exact), torch.ones_like(exact), -exact, half):
        assert tolerance.relative_rms(wrong, exact) > widest


def test_unknown_family():
    with pytest.raises(KeyError):
        tolerance.limit("attention", torch.float32, 0.0)


def test_rounded_rounds_value_and_gradient():
    x = torch.tensor([1.00390625, 3.0], dtype=torch.float64, requires_grad=True)  # 1 + 2^-8: a tie, to even
    y = rounded(x, torch.bfloat16)
    assert y.tolist() == [1.0, 3.0]
    y.backward(torch.tensor([1.01, 2.0], dtype=torch.float64))
    assert x.grad.tolist() == [1.0078125, 2.0]
    assert x.grad.dtype == torch.float64
    x.grad = None
    rounded(x, torch.bfloat16, gradient_dtype=torch.float64).backward(torch.tensor([1.01, 2.0], dtype=torch.float64))
    assert x.grad.tolist() == [1.01, 2.0]
