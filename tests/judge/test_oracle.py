"""The oracle: few elements, vanishing values, hostile metadata. Expected numbers come from tables and algebra."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest
import torch
from planting import NORM, make_spec

from kernel_templates.registry import family_module
from onboarding.stages.judge import images, oracle, trials
from onboarding.stages.judge.images import Image, ImageError


def test_luck_is_the_chi_squared_quantile() -> None:
    # P(chi^2 > q) = 2.87e-7 (five sigma, one-sided): q is 26.33 at one degree and 57.1 at ten (tables)
    assert oracle.luck(1) == pytest.approx(math.sqrt(26.33), rel=0.09)
    assert oracle.luck(10) == pytest.approx(math.sqrt(5.10), rel=0.04)
    assert oracle.luck(10_000) == 1.5


def test_effective_count() -> None:
    assert oracle.effective_count(torch.tensor([4.0, 4.0, 4.0, 0.0])) == pytest.approx(3.0)
    assert oracle.effective_count(torch.zeros(3)) == math.inf


def test_what_fp32_cannot_carry_counts_as_zero() -> None:
    expected = oracle.Expected(
        name="y",
        value=oracle.without_vanishing(torch.tensor([1e-46, -3e-60], dtype=torch.float64)),
        dtype=torch.float32,
        reference_error=0.0,
        limit=1e-5,
    )
    assert expected.compare(torch.tensor([0.0, 1e-40])).error == 0.0
    assert expected.compare(torch.tensor([0.0, 1e-3])).error == math.inf


def test_half_the_mantissa() -> None:
    value = torch.tensor([1.0 + 2.0**-3, 1.0 + 2.0**-5, -3.0], dtype=torch.float64)
    assert oracle.half_mantissa(value, torch.bfloat16).tolist() == [1.125, 1.0, -3.0]


@pytest.mark.parametrize("layout", images.LAYOUTS)
def test_layouts_hold_the_values_between_poison(layout: str) -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    if layout == "expanded":
        tensor = tensor[:, :1].expand(2, 3, 4).contiguous()
    storage, image = images.lay_out(tensor, layout, expanded_dim=1)
    assert torch.equal(image.view(storage), tensor)
    assert storage[: images.GUARD].isnan().all()
    assert storage[-images.GUARD :].isnan().all()
    assert (image.view(storage).is_contiguous()) == (layout in ("plain", "offset"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"dtype": []},
        {"stride": {}},
        {"offset": True},
        {"shape": [4, -1]},
        {"elements": 10**12},
        {"offset": 9},
        {"stride": [1]},
        {"shape": "x"},
    ],
)
def test_hostile_metadata_is_refused(change: dict[str, object]) -> None:
    good = {"dtype": "float32", "shape": [2, 3], "stride": [3, 1], "offset": 0, "elements": 6}
    assert Image.from_json(good, largest=100).shape == (2, 3)
    with pytest.raises(ImageError):
        Image.from_json(good | change, largest=100)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/etc/passwd", tmp_path / "link")
    (tmp_path / "short").write_bytes(bytes(4))
    for name in ("pipe", "link", "short", "absent"):
        with pytest.raises(ImageError):
            images.load(tmp_path / name, torch.float32, 2)


def test_a_constant_gradient_widens_no_limit_of_an_output() -> None:
    spec = make_spec("norm", NORM)
    case = family_module("norm", "cases").cases(spec, random.Random(0), 1, "interpreted")[0]
    call = oracle.expect(trials._call(spec, case, torch.Generator().manual_seed(0), torch.device("cpu")))
    ones, _ = trials._changed(call, "ones", random.Random(0))
    assert ones is not None
    oracle.expect(ones)
    assert ones.upstream_repeats == case.dims["hidden"]
    # at least 300 elements share the error of each: 1.5 is ample
    assert ones.expected["y"].limit == pytest.approx(call.expected["y"].limit, rel=0.05)
    assert ones.expected["grad x"].limit > call.expected["grad x"].limit


def test_a_rounded_operand_of_a_product_counts_once_for_its_line() -> None:
    """h w with h rounded: the error of row i is (error of h_i) w, whatever the width; of k rows there are k errors."""
    error = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)[:, None] * torch.ones(1, 2304, dtype=torch.float64)
    assert oracle.effective_count(error.square()) == pytest.approx(4 * 2304)
    assert oracle.shared_count(error.square()) == pytest.approx(4)
    assert oracle.shared_count(error.T.square()) == pytest.approx(4)
    one = torch.zeros(64, 2304, dtype=torch.float64)
    one[7] = 1.0
    assert oracle.shared_count(one) == pytest.approx(1)
