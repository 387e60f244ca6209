"""Latent attention over chosen keys is proven on the model's own class, and what differs from it is not."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from onboarding.stages.package.bundle_files.sparse_attention import chosen, flat, mismatch
from onboarding.stages.parse.uses.sparse_attention import is_sparse_latent_attention, prove_sparse_attention

EXAMPLES = Path(__file__).parents[2] / "examples"


def _attentions(model_type: str, layers: int) -> list[Any]:
    config = AutoConfig.for_model(model_type)
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [m for m in model.modules() if is_sparse_latent_attention(m)]


def _prove(module: Any) -> Any:
    return prove_sparse_attention(module, SimpleNamespace(facts={"query_heads": module.num_heads}), "bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_type", "heads", "head", "sink"),
    [("deepseek_v32", 128, 192, False), ("glm_moe_dsa", 64, 256, False), ("hy_v4", 32, 256, True)],
)
def test_published_sizes_are_read_off_the_class(model_type: str, heads: int, head: int, sink: bool) -> None:
    """512 latent and 64 rotary columns, 2048 keys; the scale is that of the plain head, not of the latent."""
    spec = _prove(_attentions(model_type, 1)[0])
    assert (spec.heads, spec.kv_heads, spec.key_dim, spec.value_dim, spec.rope_dim) == (heads, 1, 512, 512, 64)
    assert (spec.top_k, spec.sink, spec.separate) == (2048, sink, False)
    assert spec.scale == pytest.approx(head**-0.5, rel=1e-6)


def test_an_indexer_of_pools_that_makes_the_mask_itself() -> None:
    """GLM-5.3-Flash: 512 pools of 4 keys and up to 3 of the open one, no rotary columns, latents of 512."""
    attention = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next").Glm5NextTextAttention
    config = AutoConfig.from_pretrained(EXAMPLES / "glm-5.3-flash").text_config
    with torch.device("meta"):
        module = attention(config, 3)
    spec = _prove(module)
    assert (spec.heads, spec.key_dim, spec.value_dim, spec.rope) == (64, 512, 512, False)
    assert (spec.top_k, spec.scale) == (2048 + 3, 256**-0.5)
    assert mismatch(spec.to_dict(), module, {}) is None
    assert mismatch(spec.to_dict() | {"rope": True}, module, {}) == "the kernel is not of latent attention"


def test_a_list_of_keys_counts_through_the_batch_in_aligned_rows() -> None:
    found = flat(torch.tensor([[[0, 2, -1]], [[3, 4, 1]]]), 4)
    assert found.shape == (2, 1, 64)
    assert found[:, 0, :3].tolist() == [[0, 2, -1], [7, -1, 5]]  # 4 is past the last key
    assert bool((found[..., 3:] == -1).all())


def test_a_layer_that_takes_over_the_choice_is_the_same_operator() -> None:
    own, other = (next(m for m in _attentions("hy_v4", 6) if (m.indexer is None) is shared) for shared in (False, True))
    assert _prove(own) == _prove(other)


@pytest.mark.parametrize("part", ["keys", "values", "rotary"])
def test_another_expansion_of_the_latents_is_not_proven(part: str) -> None:
    module = _attentions("deepseek_v32", 1)[0]

    class Other(type(module)):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot.flip(-1) if part == "rotary" else k_rot)
            return keys.tanh() if part == "keys" else keys, values * 1.01 if part == "values" else values

    module.__class__ = Other
    assert _prove(module) is None


def test_what_the_mask_hides_is_no_choice() -> None:
    """Early rows choose keys ahead of them, and a padded sequence keys that are none; rows count through the batch."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4).clone()
    mask[1, :, :, 0] = False
    indices = torch.tensor([[0, 2], [1, 0], [2, 0], [-1, 1]], dtype=torch.int32).expand(2, 4, 2)
    expected = [[[0, -1], [1, 0], [2, 0], [-1, 1]], [[-1, -1], [5, -1], [6, -1], [-1, 5]]]
    assert chosen(indices, mask, 4).tolist() == expected
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert chosen(indices, additive, 4).tolist() == expected


def test_a_module_that_the_kernel_is_not_of_is_refused() -> None:
    module = _attentions("deepseek_v32", 1)[0]
    spec = _prove(module).to_dict()
    assert mismatch(spec, module, {}) is None
    assert mismatch(spec | {"sink": True}, module, {}) == "no sinks"
    assert mismatch(spec | {"rope": False}, module, {}) == "the kernel is not of latent attention"
    assert "qk_nope_head_dim" in str(mismatch(spec, torch.nn.Linear(2, 2), {}))
