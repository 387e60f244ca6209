"""Growing contexts: bytes counted by hand, exponents of known laws, errors that grow and that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onboarding.architecture import Growth, MemoryEstimate
from onboarding.stages.throughput import child, lengths, stage
from onboarding.stages.throughput.growth import exponent
from onboarding.stages.throughput.report import Report
from onboarding.twin.search import derive
from tests.api.story import architecture
from tests.throughput.test_throughput import config, report


def test_what_backward_reads_counts_once_and_weights_do_not() -> None:
    model = nn.Linear(8, 16, bias=False)
    x = torch.randn(32, 8)
    with lengths.saved_bytes(model) as count:
        y = model(x)  # keeps x
        (y.sin() * y.detach()).sum()  # keeps y for sin, and again (the same storage) for the product; and the sine
    assert count[0] == 4 * 32 * (8 + 16)
    with lengths.saved_bytes(model) as count:
        (model(x).exp() * 2).sum()  # the exponential alone
    assert count[0] == 4 * 32 * (8 + 16)


@pytest.mark.parametrize(
    ("law", "power"),
    [
        (Growth(constant=7.0, linear=3.0), 1.0),
        (Growth(constant=7.0, quadratic=3.0), 2.0),
        # from 64 to 128 it grows by 28672, from there to 256 by 81920
        (Growth(linear=256.0, quadratic=1.0), 1.5146),
    ],
)
def test_exponents_of_known_laws(law: Growth, power: float) -> None:
    assert exponent([law.at(tokens) for tokens in (64, 128, 256)]) == pytest.approx(power, abs=1e-4)
    assert exponent([5.0, 5.0, 5.0]) == 0


def test_the_next_peak_lies_on_the_line_through_the_last_two() -> None:
    rows = [{"tokens": 8, "bytes": 100}, {"tokens": 16, "bytes": 140}]
    assert lengths.expected_peak(rows, 32) == 220


def test_a_twin_on_growing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "CPU_LENGTHS", (16, 32, 64))
    plan = derive(config("llama-3.1-8b"), layers_at_least=2, sequence_length=32)
    job = child.Job(
        plan=plan.to_json(), config={}, device="cpu", labels=["0"] * 32, seed=0, batch=1, sequence_length=16, warm=0,
        steps=1, bundles=[None], digests=[], adapters=False, lengths=True,
    )  # fmt: skip
    told = Report.model_validate(child.measure(job))
    assert [row.tokens for row in told.lengths] == [16, 32, 64]
    assert exponent([row.bytes for row in told.lengths]) == pytest.approx(1, abs=0.15), "attention keeps no scores"
    for row in told.lengths:
        assert row.loss == pytest.approx(5.77, abs=1.5), "ln 320, from random weights"
        assert row.loss_error is not None
        assert row.gradient_error is not None
        assert row.loss_error < 1e-5  # transformers computes the loss in float32 whatever the logits are
        assert 0 < row.gradient_error < 1e-4


def told(*rows: tuple[int, int, float], **more: Any) -> Report:
    """A report whose lengths have these tokens, bytes and gradient errors."""
    grown = [
        {"tokens": t, "seconds": 1.0, "bytes": b, "loss": 5.0, "loss_error": e, "gradient_error": e, **more}
        for t, b, e in rows
    ]
    return Report.model_validate({"sizes": {}, "layers": [0], "runs": [report(False, 30.0)], "lengths": grown})


def linear_law() -> Any:
    growth = Growth(constant=9.0, linear=100.0)
    memory = MemoryEstimate(weights=0, gradients=0, optimizer=0, activations=growth, recomputed=growth)
    return architecture().model_copy(update={"memory": memory})


def test_a_law_that_holds_is_said_to_hold() -> None:
    steady = told((64, 6400, 1e-6), (128, 12800, 1.4e-6), (256, 25600, 2e-6))
    found = stage.longer(linear_law(), steady, cpu=True)
    assert found.exponent == pytest.approx(1)
    assert found.expected == pytest.approx(1)
    assert found.error_exponent == pytest.approx(0.5)
    assert "as the traced model's law says (1.00)" in found.words
    assert "NOT" not in found.words
    assert "no faster than a random walk" in found.words


def test_a_law_that_does_not_hold_is_said_not_to() -> None:
    square = told((64, 64**2, 1e-6), (128, 128**2, 4e-6), (256, 256**2, 1.6e-5), loss=float("inf"))
    found = stage.longer(linear_law(), square, cpu=True)
    assert found.exponent == pytest.approx(2)
    assert "NOT as the traced model's law says (1.00)" in found.words
    assert "FASTER than a random walk" in found.words
    assert "a loss is NOT finite" in found.words
