"""Every model with a published total (slow): census within half a percent, forward and backward traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboarding.stages.parse.analyse import analyse

MODELS = json.loads(Path(__file__).with_name("published_models.json").read_text())["models"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=[model["name"] for model in MODELS])
def test_published_totals(model: dict[str, Any]) -> None:
    config = {**model["config"], "model_type": model["model_type"], "architectures": [model["architecture"]]}
    parsed = analyse(config, tokens=4096, name=model["name"])
    census = parsed.architecture.census
    built = sum(p.numel() for p in parsed.model.parameters())
    assert built == model["computed_total"]
    # LongCat-Flash's class allocates half of the matrices of experts that compute nothing; they are not counted
    assert sum(census.by_role.values()) == built - (180388626432 if model["model_type"] == "longcat_flash" else 0)
    assert census.total == pytest.approx(model["published_total"], rel=5e-3)
    if model["name"].startswith(("DeepSeek-V3", "GLM-4.5")):  # to the router's biases and the scales of FP8 blocks
        assert census.total == pytest.approx(model["published_total"], rel=1e-4)
    assert parsed.trace.backward
    if model["published_active"]:
        assert census.active < 1.45 * model["published_active"]
