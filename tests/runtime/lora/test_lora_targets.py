"""What a target means, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from runtime.lora.adapter import adapter_of, apply_lora, is_adapter, merge
from runtime.lora.config import LoraConfig
from runtime.lora.targets import find_targets
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.prove import twins


def _leaves(name: str, *targets: str) -> set[str]:
    found = find_targets(twins.build(name, torch.float32), LoraConfig(targets=targets))
    leaves = {n.rpartition(".")[2] for n in found.linears}
    return leaves | {f"experts.{w}" for weights in found.experts.values() for w in weights}


@pytest.mark.parametrize(
    ("twin", "target", "expected"),
    [
        ("qwen3_moe", "qkv", {"q_proj", "k_proj", "v_proj"}),
        ("qwen3_moe", "attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt_oss", "gmm", {"experts.gate_up_proj", "experts.down_proj"}),
        ("deepseek_v3", "qkv", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}),
        ("deepseek_v3", "mlp", {"gate_proj", "up_proj", "down_proj"}),
        ("deepseek_v3", "experts.down_proj", {"experts.down_proj"}),
    ],
)
def test_roles_and_names(twin: str, target: str, expected: set[str]) -> None:
    assert _leaves(twin, target) == expected


def test_linear_attention_counts_as_attention() -> None:
    found = find_targets(twins.build("kimi_linear", torch.float32), LoraConfig(targets=("attention",)))
    assert any("layers.0." in n and n.endswith("o_proj") for n in found.linears)
    assert not any(".mlp." in n or "embed" in n or "lm_head" in n for n in found.linears)


def test_an_unknown_target_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'qproj' matches nothing.*roles are qkv.*names end in .*q_proj"):
        find_targets(twins.build("qwen3_moe", torch.float32), LoraConfig(targets=("qproj",)))


class _Router(nn.Module):
    """A routed block in the older style, whose router is a linear layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        block = model.get_submodule("model.layers.0.mlp")
        self.experts = block.get_submodule("experts")
        self.scores = nn.Linear(16, twins.EXPERTS, bias=False)


def test_routers_take_no_adapter() -> None:
    block = _Router(twins.build("qwen3_moe", torch.float32))
    model = nn.Module()
    model.layers = nn.ModuleList([block])
    with pytest.raises(ValueError, match="is a router"):
        find_targets(model, LoraConfig(targets=("scores",)))
    with pytest.raises(ValueError, match="matches nothing"):
        find_targets(model, LoraConfig(targets=("linear",)))


@pytest.mark.parametrize(
    ("settings", "fix"),
    [({"r": 0}, "r must be"), ({"dropout": 1.0}, "dropout must be"), ({"targets": ()}, "targets is empty")],
)
def test_settings_are_checked(settings: dict[str, object], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        LoraConfig(**settings)  # type: ignore[arg-type]


def test_only_adapters_train_and_a_second_adapter_is_refused() -> None:
    model = twins.build("qwen3_moe", torch.float32)
    apply_lora(model, LoraConfig())
    assert {is_adapter(n) for n, p in model.named_parameters() if p.requires_grad} == {True}
    assert {is_adapter(n) for n, p in model.named_parameters() if not p.requires_grad} == {False}
    with pytest.raises(ValueError, match="has adapters already"):
        apply_lora(model, LoraConfig())


def test_case_34_adapters_of_latent_experts_have_the_latent_width() -> None:
    """Widths come from the weights, so experts on a compressed width need no setting."""
    model = twins.build("qwen3_moe", torch.float32)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.gate_up_proj = nn.Parameter(torch.zeros(8, 24, 6))
    experts.down_proj = nn.Parameter(torch.zeros(8, 6, 12))
    apply_lora(model, LoraConfig(r=2, targets=("gmm",)))
    lora = experts.get_submodule("lora")
    assert lora.get_parameter("gate_up_proj_A").shape == (8, 2, 6)
    assert lora.get_parameter("down_proj_B").shape == (8, 6, 2)


def test_the_initial_adapter_is_a_function_of_seed_and_name() -> None:
    first, second, other = (twins.build("qwen3_moe", torch.float32) for _ in range(3))
    apply_lora(first, LoraConfig(r=4))
    torch.manual_seed(99)
    apply_lora(second, LoraConfig(r=4))
    apply_lora(other, LoraConfig(r=4, seed=1))
    for name, parameter in first.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, second.get_parameter(name))
            assert name.endswith("_B") or not torch.equal(parameter, other.get_parameter(name))
            bound = parameter.shape[-1] ** -0.5
            assert parameter.abs().max() <= (0 if name.endswith("_B") else bound)


@pytest.mark.parametrize("twin", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("experts", ["grouped", "merged"])
def test_merging_changes_no_logit(twin: str, experts: str) -> None:
    model = twins.build(twin, torch.float64)
    apply_lora(model, LoraConfig(r=3, targets=("linear", "gmm"), experts=experts))  # type: ignore[arg-type]
    twins.fill(model, only="_B")
    parallelize(model, Meshes.alone("cpu"), ParallelConfig())
    ids = torch.randint(0, twins.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=ids, use_cache=False).logits
    merge(model)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before, rtol=1e-6, atol=1e-9)
    plain = {n for n, _ in twins.build(twin, torch.float64).named_parameters()}
    assert {n for n, _ in model.named_parameters()} == plain
    with pytest.raises(ValueError, match="no adapters"):
        adapter_of(model)


def test_a_dense_model_takes_adapters_too() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    found = apply_lora(model, LoraConfig(targets=("linear",)))
    assert len(found.linears) == 7
    assert found.experts == {}
    with pytest.raises(ValueError, match="'gmm' matches nothing"):
        find_targets(model, LoraConfig(targets=("gmm",)))
