"""Dense products may be the library's in a family that says so, but nothing else of its answer; in others none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planting import NORM, candidate, make_spec, verdict
from warmed import warm_parent  # noqa: F401  (a fixture)

from kernel_templates.registry import FAMILIES, spec_class
from onboarding.stages.judge import work

pytestmark = pytest.mark.sandbox
LOSS: dict[str, Any] = {"hidden": 48, "vocabulary": 300}


def test_only_the_loss_leaves_its_products_to_the_library() -> None:
    assert [family for family in FAMILIES if spec_class(family).library_products] == ["linear_cross_entropy"]
    assert not work.PRODUCTS & work.ALLOWED


def test_a_loss_with_library_products_is_accepted(tmp_path: Path) -> None:
    spec = make_spec("linear_cross_entropy", LOSS)
    found = verdict(candidate(spec), spec, tmp_path)
    assert found.outcome == "accepted", found.reasons


LOGITS = 'torch.mm(tensors["x"].float(), tensors["weight"].float().t())'
SQUARE = 'torch.zeros(1, 16, 16, device=tensors["x"].device)'


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        (f"row = torch.logsumexp({LOGITS}, -1)", "logsumexp"),
        (f"row = torch.softmax({LOGITS}, -1)", "_softmax"),
        (f"row = torch.exp({LOGITS})", "exp"),
        (f"row = torch.baddbmm({SQUARE}, {SQUARE}, {SQUARE})", "baddbmm"),
    ],
)
def test_more_than_the_products_is_refused(line: str, operator: str, tmp_path: Path) -> None:
    """Torch makes the logits and what becomes of them; whether the answer is then taken from it does not matter."""
    spec = make_spec("linear_cross_entropy", LOSS)
    extra = f"\n\n_own_forward = forward\n\n\ndef forward(tensors, config, needs=None):\n    {line}\n"
    extra += "    return _own_forward(tensors, config, needs)\n"
    found = verdict(candidate(spec) + extra.encode(), spec, tmp_path)
    assert found.outcome == "refused"
    said = " | ".join(found.reasons)
    assert "its host code leaves work to torch" in said, said
    assert f"aten::{operator}" in said, said


def test_the_whole_loss_by_torch_is_refused(tmp_path: Path) -> None:
    spec = make_spec("linear_cross_entropy", LOSS)
    extra = """

_own_forward = forward


def forward(tensors, config, needs=None):
    outputs, saved = _own_forward(tensors, config, needs)
    z = torch.mm(tensors["x"].float(), tensors["weight"].float().t())
    target = tensors["target"]
    counts = target != -100
    row = torch.where(counts, z.logsumexp(-1) - z.gather(-1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    count = counts.sum() if tensors["denominator"] is None else tensors["denominator"]
    return {"loss": torch.where(count == 0, 0.0, row.sum() / count)}, saved
"""
    found = verdict(candidate(spec) + extra.encode(), spec, tmp_path)
    assert found.outcome == "refused"
    said = " | ".join(found.reasons)
    assert "loss is right although its kernels did nothing" in said, said


def test_a_product_in_another_family_is_refused(tmp_path: Path) -> None:
    """A norm whose sums of squares come out of a matrix product."""
    extra = """

_own_forward = forward


def forward(tensors, config):
    x = tensors["x"].reshape(-1, tensors["x"].shape[-1]).float()
    squares = torch.mm(x, x.t())
    return _own_forward(tensors, config)
"""
    spec = make_spec("norm", NORM)
    found = verdict(candidate(spec) + extra.encode(), spec, tmp_path)
    assert found.outcome == "refused"
    assert any("leaves work to torch" in r and "aten::mm" in r for r in found.reasons), found.reasons
