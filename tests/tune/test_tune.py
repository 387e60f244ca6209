"""Tuning: skipped without a GPU, and independent kernels' winners are combined."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onboarding.problem import StageSkipped
from onboarding.stages.tune.child import combine
from onboarding.stages.tune.stage import run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped_with_the_reason() -> None:
    context = SimpleNamespace(options=SimpleNamespace(device="auto"))
    with pytest.raises(StageSkipped, match="no GPU here"):
        run(context)  # type: ignore[arg-type]


def test_winners_of_independent_kernels_are_combined() -> None:
    base = {"scan_bv": 64, "scan_warps": 4, "gram_bk": 32}
    configs = [base, base | {"scan_bv": 32}, base | {"scan_bv": 16, "scan_warps": 8}, base | {"gram_bk": 64}]
    assert combine(configs, [10.0, 9.0, 8.0, 9.5]) == {"scan_bv": 16, "scan_warps": 8, "gram_bk": 64}
    # what is slower than the base is left out; a single winner is in the list already
    assert combine(configs, [10.0, 11.0, 12.0, 9.5]) is None
    assert combine(configs[:2], [1.0, 2.0]) is None
