"""The reduced twin: kinds, flags, life, and learning; for the shipped examples fast, for all published models slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onboarding.problem import Problem
from onboarding.twin import TwinPlan, build, derive, layers, models, shrink
from onboarding.twin.learn import Learned
from onboarding.twin.learn import learn as train

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/config.json"))
KINDS = {
    # the layers that stand for every block kind, read off the published configs by hand
    "kimi-linear": (0, 1, 3),
    "llama-3.1-8b": (0,),
    "qwen3-30b-a3b": (0,),
    "qwen3-next-80b-a3b": (0, 3),
    "deepseek-v3": (0, 3),
    "glm-5.3-flash": (0, 3, 4),
}
SPECIAL = "token_id"


def config_of(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((EXAMPLES[0].parents[1] / name / "config.json").read_text())
    return data


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config") or config
    return text


@pytest.fixture(scope="module")
def plans() -> dict[str, TwinPlan]:
    return {path.parent.name: derive(json.loads(path.read_text())) for path in EXAMPLES}


def test_every_example_has_an_expected_selection(plans: dict[str, TwinPlan]) -> None:
    assert {name: plan.layers for name, plan in plans.items()} == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_odd_flags_survive(name: str, plans: dict[str, TwinPlan]) -> None:
    published, small = text_of(config_of(name)), text_of(plans[name].config)
    kept = [k for k, v in published.items() if isinstance(v, (bool, float)) and k in small]
    assert kept
    for key in kept:
        if key != "initializer_range":
            assert small[key] == published[key], key
    for key, value in published.items():
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and SPECIAL not in key
            and isinstance(small.get(key), int)
        ):
            assert (small[key] == 0) == (value == 0), key
            assert small[key] <= value, key


def test_grouping_of_heads_and_experts_is_kept(plans: dict[str, TwinPlan]) -> None:
    llama = plans["llama-3.1-8b"].config
    assert 1 < llama["num_key_value_heads"] < llama["num_attention_heads"]
    deepseek = plans["deepseek-v3"].config
    assert deepseek["num_attention_heads"] == deepseek["num_key_value_heads"]
    # the published groups: a routing kernel is made for them
    assert (deepseek["n_group"], deepseek["topk_group"]) == (8, 4)
    assert deepseek["n_routed_experts"] % deepseek["n_group"] == 0
    assert deepseek["n_routed_experts"] >= 2 * deepseek["n_group"]
    assert deepseek["num_experts_per_tok"] < deepseek["n_routed_experts"]
    following = plans["qwen3-next-80b-a3b"].config
    assert following["linear_num_value_heads"] == 2 * following["linear_num_key_heads"]
    assert following["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_windows_cut_and_head_dims_fit_an_mma() -> None:
    fields = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "vocab_size": 10**5,
    }
    small = shrink.shrink(
        {**fields, "pad_token_id": 99_999, "eos_token_id": [2, 99_999]}, shrink.rules_for(fields, 64)[0]
    )
    assert small["sliding_window"] == 16
    assert small["head_dim"] == 16
    # special tokens sit behind the bytes, equal ones stay equal
    assert small["pad_token_id"] == 256
    assert small["eos_token_id"] == [257, 256]
    assert small["vocab_size"] >= 258


@pytest.mark.parametrize("name", KINDS)
def test_every_branch_is_alive_and_the_loss_falls(name: str, plans: dict[str, TwinPlan]) -> None:
    model: Any = build(plans[name])
    assert_alive(model)
    losses = learn(model)
    assert losses[-1] < 0.7 * losses[0]


def assert_alive(model: Any) -> None:
    """No parameter is a constant, every text parameter gets a gradient, every expert is hit."""
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1:
            assert parameter.std() > 0, name
    hit: dict[str, set[int]] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("experts") and hasattr(module, "num_experts"):

            def note(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                if len(args) > 1 and not args[1].is_floating_point():
                    hit[name] = set(args[1].flatten().tolist())

            handles.append(module.register_forward_hook(note))
    ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, experts in hit.items():
        assert len(experts) == model.get_submodule(name).num_experts, name
    for name, parameter in model.named_parameters():
        # the indexers of sparse attention get no gradient in the reference either; towers see no image here
        if "indexer" not in name and not layers._in_tower(name):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name
    model.zero_grad()
    for handle in handles:
        handle.remove()


def learn(model: Any, steps: int = 20) -> list[float]:
    ids = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED, ids=[entry["name"] for entry in PUBLISHED])
def test_every_published_model_has_a_living_twin(published: dict[str, Any]) -> None:
    model: Any = build(derive(published["config"], layers_at_least=2))
    assert_alive(model)
    losses = learn(model)
    assert losses[-1] < 0.7 * losses[0]


def test_depth_has_a_lower_bound_and_the_plan_survives_json() -> None:
    plan = derive(config_of("kimi-linear"), layers_at_least=4)
    assert plan.layers == (0, 1, 2, 3)
    assert TwinPlan.from_json(plan.to_json()) == plan


def test_same_seed_same_values_in_every_dtype(plans: dict[str, TwinPlan]) -> None:
    plan = plans["kimi-linear"]
    single, again = build(plan, seed=3), build(plan, seed=3)
    double, half = build(plan, dtype=torch.float64, seed=3), build(plan, dtype=torch.bfloat16, seed=3)
    other = build(plan, seed=4)
    for name, parameter in single.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter.double(), double.get_parameter(name))
        kept = half.get_parameter(name)
        assert torch.equal(parameter.to(kept.dtype), kept)
    assert half.get_parameter("model.layers.0.self_attn.forget_gate.dt_bias").dtype == torch.float32
    assert not torch.equal(single.get_parameter("lm_head.weight"), other.get_parameter("lm_head.weight"))


def test_kinds_see_through_sizes_but_not_flags() -> None:
    class Block(nn.Module):
        def __init__(self, width: int, window: int | None, gated: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.window = window
            self.gated = gated

    class Model(nn.Module):
        def __init__(self, *blocks: Block) -> None:
            super().__init__()
            self.layers = nn.ModuleList(blocks)

    model = Model(Block(4, 1, True), Block(8, 2, True), Block(4, None, True), Block(4, 1, False))
    a, b, c, d = layers.kinds(model, {"types": ["x", "x", "x", "x"]}, ["types"])
    assert a == b
    assert len({a, c, d}) == 3
    assert layers.selections([a, b, c, d], 1) == [[0, 2, 3], [0, 1, 2, 3]]


def test_unknown_models_are_refused() -> None:
    with pytest.raises(Problem) as caught:
        derive({"model_type": "no_such_model", "hidden_size": 64})
    assert caught.value.kind == "unknown-model-type"


def test_a_model_that_cannot_shrink_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(models, "trial", broken)
    with pytest.raises(Problem) as caught:
        derive(config_of("llama-3.1-8b"))
    assert caught.value.kind == "twin-not-derived"
    assert "free sizes" in caught.value.detail
    assert "shapes do not fit" in caught.value.detail


FAST = ("codegen", "marian", "reformer")
SLOW = (
    "big_bird", "dory", "emu3", "gemma3n_text", "gemma4_assistant", "glm4v", "hrm_text", "recurrent_gemma", "xlstm",
    "zamba2",
)  # fmt: skip


@pytest.mark.parametrize("model_type", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_architectures_of_other_families_have_a_twin_that_learns(model_type: str) -> None:
    plan = derive({"model_type": model_type}, assume=True)
    learned = train(plan)
    assert learned.good, learned.reason
    assert learned.losses[-1] < learned.losses[0]
    assert int(plan.sizes["parameters"]) < 1_200_000


def test_what_does_not_learn_says_so() -> None:
    assert "is not finite" in Learned(losses=[3.0, float("nan")]).reason
    assert "from 3.000 to 2.990" in Learned(losses=[3.0, 2.99]).reason
    assert Learned(losses=[3.0, 1.0]).good


def test_sections_of_a_stack_are_cut_like_its_layers() -> None:
    fields = {"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
    assert layers.sections(fields, 8) == ["n_input_layers", "n_recurrent_layers", "n_output_layers"]
    cut = layers.with_layers(fields, [0, 3, 4, 7], 8)
    assert cut == {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
    assert layers.sections({"num_hidden_layers": 8, "n_input_layers": 3, "n_output_layers": 2}, 8) == []


def test_lists_and_patterns_of_a_stack_are_cut_like_its_layers() -> None:
    fields = {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "c"],
        "hybrid_override_pattern": "M*ME",
        "attention_type": "lshx",  # a word as long as the stack is deep
        "global_layer_idxs": [1, 3],
        "per_layer_config": {"3": {"head_dim": 8}},
        "num_kv_shared_layers": 2,
    }
    assert layers.with_layers(fields, [0, 1, 3], 4) == {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "c"],
        "hybrid_override_pattern": "M*E",
        "attention_type": "lshx",
        "global_layer_idxs": [1, 2],
        "per_layer_config": {"2": {"head_dim": 8}},
        "num_kv_shared_layers": 1,
    }


def test_lists_that_make_up_a_width_or_a_head_keep_doing_so() -> None:
    fields = {
        "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "axial_pos_embds_dim": [64, 192],
        "rope_parameters": {"mrope_section": [8, 12, 12], "rope_type": "default"},
    }  # fmt: skip
    small = shrink.shrink(fields, shrink.rules_for(fields, 64)[0])
    assert sum(small["axial_pos_embds_dim"]) == small["hidden_size"] == 64
    assert small["axial_pos_embds_dim"] == [16, 48]
    assert sum(small["rope_parameters"]["mrope_section"]) == small["head_dim"] // 2 == 8
