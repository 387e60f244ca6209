"""Configurations that their class leaves broken are filled in by constraints; what a user states is never changed."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config

from onboarding.problem import Problem
from onboarding.stages.parse.analyse import analyse
from onboarding.stages.parse.build import build_config, build_model
from onboarding.stages.parse.repair import Attempt, Repair, with_repairs
from onboarding.stages.parse.sanity import check_sizes


def built(config: dict[str, Any], state: Attempt) -> Any:
    state.config = build_config(config)
    return build_model(state.config)[0]


def repairs_of(config: dict[str, Any], *, assume: bool = False) -> dict[str, Repair]:
    _, repaired, repairs = with_repairs(config, built, assume=assume)
    for repair in repairs:
        value: Any = repaired
        for name in repair.path:
            value = value[name]
        assert value == repair.value
    return {".".join(repair.path): repair for repair in repairs}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        # defaults of the classes: 48 heads and no key-value heads; 4096 / 32 and no head size
        ({"model_type": "nemotron"}, "num_key_value_heads", 48),
        ({"model_type": "hunyuan_v1_dense", "hidden_size": 2048, "num_attention_heads": 16}, "head_dim", 128),
        # the exception's own words
        ({"model_type": "reformer"}, "is_decoder", True),
        # 14 heads do not divide 1152; 12 and 16 do and are as near
        ({"model_type": "aya_vision"}, "vision_config.num_attention_heads", 16),
        ({"model_type": "dots1"}, "n_routed_experts", DeepseekV3Config().n_routed_experts),
        ({"model_type": "dbrx"}, "attn_config.rope_theta", 10000.0),
    ],
)
def test_what_a_class_leaves_unset_is_filled_in(config: dict[str, Any], field: str, value: Any) -> None:
    assert repairs_of(config)[field].value == value


def test_a_working_configuration_is_not_touched() -> None:
    assert repairs_of({"model_type": "llama", "num_hidden_layers": 2}) == {}


def test_sizes_are_assumed_only_where_that_is_asked_for() -> None:
    with pytest.raises(Problem) as caught:
        repairs_of({"model_type": "qwen4_exp_text"})
    assert "indexer" in caught.value.detail
    assert repairs_of({"model_type": "qwen4_exp_text"}, assume=True)["indexer_kv_heads"].value == 1


def test_a_stated_field_that_does_not_work_is_named_and_kept() -> None:
    config = {"model_type": "opt", "hidden_size": 768, "num_attention_heads": 7, "word_embed_proj_dim": 768}
    with pytest.raises(Problem) as caught:
        with_repairs(config, built)
    assert caught.value.kind == "model-not-built"
    assert caught.value.extra["field"] in ("hidden_size", "num_attention_heads")
    assert config["num_attention_heads"] == 7


def test_a_contradiction_that_only_a_run_shows_has_a_partial_report() -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 3,
    }  # fmt: skip
    with pytest.raises(Problem) as caught:
        analyse(config, tokens=128)
    assert caught.value.kind == "model-not-traced"
    partial = caught.value.extra["partial"]
    assert partial["class_name"] == "MixtralForCausalLM"
    assert partial["kinds"] == [[0, 1]]
    # embedding, head, final norm; a layer: attention 64 (2 x 64 + 2 x 32), router 2 x 64, experts 2 x 3 x 64 x 64
    layer = 64 * (2 * 64 + 2 * 32) + 2 * 64 + 2 * 3 * 64 * 64 + 2 * 64
    assert partial["parameters"] == 2 * 100 * 64 + 64 + 2 * layer


@pytest.mark.parametrize(
    ("config", "kind", "field"),
    [
        ({"vision_config": {"num_hidden_layers": 10**7}}, "config-out-of-range", "vision_config.num_hidden_layers"),
        ({"num_experts": 10**9}, "config-out-of-range", "num_experts"),
        ({"hidden_size": 10**15}, "config-out-of-range", "hidden_size"),
        ({"rope_parameters": {"factor": float("nan")}}, "config-not-finite", "rope_parameters.factor"),
        ({"scales": [1.0, float("inf")]}, "config-not-finite", "scales"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_built(config: dict[str, Any], kind: str, field: str) -> None:
    with pytest.raises(Problem) as caught:
        analyse({"model_type": "llama", **config}, tokens=128)
    assert (caught.value.kind, caught.value.extra["field"]) == (kind, field)


def test_a_configuration_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    deep["text_config"] = deep
    with pytest.raises(Problem) as caught:
        check_sizes(deep)
    assert caught.value.kind == "config-too-deep"


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        # neither divides 64 nor shares two key-value heads: it is the odd one of three
        ({**MIXTRAL, "num_attention_heads": 7}, "num_attention_heads", "7 query heads"),
        ({**MIXTRAL, "num_local_experts": 0}, "num_local_experts", "2 of 0 experts"),
        ({**MIXTRAL, "num_experts_per_tok": 0}, "num_experts_per_tok", "0 of 4 experts"),
        ({**LLAMA, "rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}}, "rope_parameters.rope_type", "yarn"),
        ({**LLAMA, "intermediate_size": 0}, "intermediate_size", "it is 0"),
        ({**LLAMA, "hidden_size": "big"}, "hidden_size", "'big'"),
        ({**LLAMA, "head_dim": 63}, "head_dim", "63"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types", "1 entries for num_hidden_layers 2"),
    ],
)
def test_the_field_that_does_not_fit_is_blamed(config: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(Problem) as caught:
        analyse(config, tokens=64)
    assert caught.value.extra["field"] == field
    assert words in caught.value.detail


def test_a_tower_whose_parts_do_not_join_is_given_the_width_that_comes_in() -> None:
    # transformers' default: 768 channels, four pixels a token, 3072 wide, read by a layer that expects 5632
    config = {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {"model_type": "llama4_text", "num_hidden_layers": 1, "hidden_size": 5120, "vocab_size": 256},
    }
    found = analyse(config, tokens=64, assume=True)
    assert found.trace.tower
    assert found.config.vision_config.intermediate_size == 4 * found.config.vision_config.hidden_size
    assert any("vision_config.intermediate_size taken as 3072" in words for words in found.architecture.warnings)
