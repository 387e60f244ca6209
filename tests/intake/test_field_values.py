"""Values that no model can have are refused before a job exists, with the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from onboarding.examples import example_config, example_names
from onboarding.pipeline import JobOptions
from onboarding.problem import Problem
from onboarding.stages.intake.check import check_definition


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
