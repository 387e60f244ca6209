"""A result whose terms cancel is no evidence; one that nothing leads to is held to zeros."""

from __future__ import annotations

import random

import pytest
import torch
from planting import make_spec, small_spec
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge import oracle, trials
from onboarding.stages.judge.oracle import Call


def drawn(spec: OperatorSpec, case: Case, seed: int) -> Call:
    generator = torch.Generator().manual_seed(seed)
    return oracle.expect(trials._call(spec, case, generator, torch.device("cpu")))


def routed(rows: int, top_k: int, seed: int, activation: str = "softmax") -> Call:
    spec = make_spec("routing", {"experts": 8, "top_k": top_k, "renormalise": True, "activation": activation})
    dims = {"rows": rows, "experts": 8, "top_k": top_k}
    return drawn(spec, Case(name="one", dims=dims, dtype=spec.dtype, distribution="normal"), seed)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_a_single_renormalised_weight_has_no_gradient_to_compare(activation: str) -> None:
    # w / w is 1 whatever w is: its gradient is a difference of equal numbers, 0 by algebra
    exact_zeros = 0
    for seed in range(40):
        call = routed(1, 1, seed, activation)
        exact_zeros += not bool(call.expected["grad logits"].value.any())
        assert not call.well_posed
    assert exact_zeros > 0  # where no relative error of the rounded reference would tell


def test_two_renormalised_weights_have_one() -> None:
    call = routed(3, 2, 0)
    assert call.well_posed
    assert oracle.cancelled(call) == []


@pytest.mark.parametrize(
    ("family", "zero"),
    [("norm", "grad weight"), ("linear_cross_entropy", "grad x"), ("short_convolution", "grad weight")],
)
def test_what_nothing_leads_to_is_held_to_zeros(family: str, zero: str) -> None:
    spec = small_spec(family)
    held = 0
    for case in family_module(family, "cases").cases(spec, random.Random(0), 8, "interpreted"):
        call = drawn(spec, case, 0)
        expected = call.expected[zero].value
        if expected.numel() and not bool(expected.any()):
            assert call.well_posed, case.name
            held += 1
    assert held > 0


def test_random_rounding_keeps_products_with_zero_and_moves_cancelled_sums() -> None:
    x = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with oracle._RoundsAtRandom():
        cancels = (x * 3 - x * 2 - x).detach()
        kept: Tensor = x * 0
        (gradient,) = torch.autograd.grad((x / (x * 1)).sum(), x)
    assert bool(cancels.any())
    assert not bool(kept.any())
    assert bool(gradient.any())
    assert float(cancels.abs().max()) < 10 * oracle._JITTER
