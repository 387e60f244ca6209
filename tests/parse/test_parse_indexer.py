"""The choice of keys is proven on the models' own indexers, and one that differs is not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from onboarding.stages.parse.uses.indexer import is_indexer, prove_indexer

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASSES = {
    "deepseek_v32": "DeepseekV32Indexer",
    "glm_moe_dsa": "GlmMoeDsaIndexer",
    "axk2": "AXK2Indexer",
    "hy_v4": "HYV4Indexer",
    "glm5_next": "Glm5NextTextIndexer",
}


def _indexer(model_type: str) -> Any:
    """A model's indexer without memory; GLM-5.3-Flash at its published sizes."""
    made = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    if model_type == "glm5_next":
        config = AutoConfig.from_pretrained(EXAMPLES / "glm-5.3-flash").text_config
    else:
        config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        return getattr(made, CLASSES[model_type])(config, 3)


@pytest.mark.parametrize(
    ("model_type", "heads", "kept", "context"),
    [
        ("deepseek_v32", 64, 2048, 8192),
        ("glm_moe_dsa", 32, 2048, 8192),
        ("axk2", 16, 2048, 8192),
        ("hy_v4", 16, 2048, 8192),
        ("glm5_next", 32, 512, 2048),  # pools of 4
    ],
)
def test_published_sizes_are_read_off_the_class(model_type: str, heads: int, kept: int, context: int) -> None:
    module = _indexer(model_type)
    assert is_indexer(module)
    spec = prove_indexer(module, 8192, "bfloat16")
    assert spec is not None
    assert (spec.operation, spec.heads, spec.head_dim, spec.top_k) == ("selection", heads, 128, kept)
    assert (spec.activation, spec.weighted, spec.context) == ("relu", True, context)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm5_next"])
def test_another_choice_is_not_proven(model_type: str) -> None:
    """The worst keys in place of the best."""
    module = _indexer(model_type)

    class Worst(type(module)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = super().forward(-hidden_states, *args, **kwargs)
            return found

    module.__class__ = Worst
    assert prove_indexer(module, 8192, "bfloat16") is None


def test_what_has_other_projections_is_no_indexer() -> None:
    assert not is_indexer(nn.Linear(2, 2))
