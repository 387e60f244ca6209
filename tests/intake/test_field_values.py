"""Values that no model can have are refused before a job exists, with the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from onboarding.examples import example_config, example_names
from onboarding.pipeline import JobOptions
from onboarding.problem import Problem
from onboarding.stages.intake.check import check_definition
from onboarding.stages.intake.contradictions import contradictions
from onboarding.stages.intake.model_types import config_class, known_model_types


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("num_attention_heads", 0, "config-out-of-range"),
        ("rms_norm_eps", -1.0, "config-out-of-range"),
        ("rms_norm_eps", 0.0, "config-out-of-range"),
        ("hidden_act", "os.system", "config-unknown-activation"),
        ("vocab_size", 1e30, "config-out-of-range"),
        ("sliding_window", -5, "config-out-of-range"),
        ("rope_theta", 0.0, "config-out-of-range"),
        ("num_key_value_heads", 5, "config-contradicts-itself"),
    ],
)
def test_impossible_values_are_refused(field: str, value: Any, kind: str) -> None:
    config = example_config("llama-3.1-8b") | {field: value}
    with pytest.raises(Problem) as caught:
        check_definition({"config.json": json.dumps(config).encode()})
    assert (caught.value.kind, caught.value.extra["field"]) == (kind, field)


def _published(name: str) -> dict[str, Any]:
    models = json.loads((Path(__file__).parents[1] / "parse" / "published_models.json").read_text())["models"]
    found = next(model for model in models if model["name"].startswith(name))
    return {**found["config"], "model_type": found["model_type"], "architectures": [found["architecture"]]}


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("Mixtral", "num_attention_heads", 7, "7 query heads cannot share 8"),
        ("Mixtral", "num_experts_per_tok", 0, "0 of 8 experts"),
        ("gpt-oss", "layer_types", ["full_attention"] * 5, "5 entries for num_hidden_layers 24"),
        ("Llama-3.1", "hidden_size", None, "must be int, not null"),
        ("Llama-3.1", "vocab_size", 1e30, "astronomical"),
        ("Llama-3.1", "intermediate_size", 0, "is 0"),
        ("Llama-3.1", "rope_scaling", "yarn", "must be an object"),
        ("Llama-3.1", "num_hidden_layers", 10_000, "is 10000"),
        ("DeepSeek-V3", "kv_lora_rank", 0, "is 0"),
        ("DeepSeek-V3", "qk_rope_head_dim", 63, "no pairs to rotate"),
        ("DeepSeek-V3", "n_group", 7, "7 groups"),
        ("Qwen3-30B", "moe_intermediate_size", 0, "is 0"),
        ("Qwen3-Next", "linear_num_value_heads", 33, "do not divide into 16 groups"),
        ("Qwen3-Next", "partial_rotary_factor", 3.0, "cannot be rotated"),
        ("Nemotron-H", "n_groups", 7, "do not divide into 7 groups"),
        ("Nemotron-H", "hybrid_override_pattern", "M-M*", "4 letters for num_hidden_layers 52"),
        ("Mamba-Codestral", "conv_kernel", 0, "is 0"),
        ("Jamba", "attn_layer_period", 0, "is 0"),
    ],
)
def test_what_cannot_hold_together_is_refused_at_the_door(name: str, field: str, value: Any, words: str) -> None:
    check_definition({"config.json": json.dumps(_published(name)).encode()})
    with pytest.raises(Problem) as caught:
        check_definition({"config.json": json.dumps(_published(name) | {field: value}).encode()})
    assert caught.value.extra["field"] == field
    assert words in caught.value.title


def test_zero_where_it_means_none_is_taken() -> None:
    for name, field in (("DeepSeek-V3", "n_shared_experts"), ("Granite", "shared_intermediate_size")):
        check_definition({"config.json": json.dumps(_published(name) | {field: 0}).encode()})


def test_no_class_contradicts_itself_by_its_own_defaults() -> None:
    """The rules against transformers' own 500 classes: what they build by default is not refused."""
    found = {}
    for model_type in known_model_types():
        declared = config_class(model_type)
        fields = dict(declared.defaults) if declared else {}
        found[model_type] = [c.field for c in contradictions(fields, fields) if c.certain]
    # 28 heads in 2048 channels: the class cannot be built from its own defaults (docs/coverage.md)
    assert {k: v for k, v in found.items() if v} == {"qwen3_omni_moe_text": ["num_attention_heads"]}


def test_a_tower_is_checked_by_its_own_class() -> None:
    config = _published("Llama-4")
    config["vision_config"] = {**config["vision_config"], "model_type": "llama4_vision_model", "hidden_size": None}
    with pytest.raises(Problem) as caught:
        check_definition({"config.json": json.dumps(config).encode()})
    assert caught.value.extra["field"] == "vision_config.hidden_size"


def test_a_window_may_be_switched_off() -> None:
    config = example_config("llama-3.1-8b") | {"sliding_window": -1}
    check_definition({"config.json": json.dumps(config).encode()})


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    config = example_config("qwen3-30b-a3b") | {"num_experts_per_tok": 129}
    with pytest.raises(Problem) as caught:
        check_definition({"config.json": json.dumps(config).encode()})
    assert (caught.value.kind, caught.value.extra["field"]) == ("config-contradicts-itself", "num_experts_per_tok")
    assert "129 of 128 experts" in caught.value.title


@pytest.mark.parametrize("name", example_names())
def test_published_definitions_pass(name: str) -> None:
    check_definition({"config.json": json.dumps(example_config(name)).encode()})


@pytest.mark.parametrize("options", [{"target": "tpu"}, {"seed": -1}, {"seed": 10**30}, {"sequence_length": 0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JobOptions.model_validate(options)
