"""PEFT is the peer: it loads what we export and gives the same logits, bit for bit in fp32."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runtime.lora.adapter import apply_lora, is_adapter
from runtime.lora.config import LoraConfig
from runtime.lora.files import export_adapter, load_adapter, stack, unstack
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.prove import twins

IDS = torch.randint(0, twins.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """With several threads the library's products depend on where operands lie in memory: two equal calls differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _adapted(base: nn.Module, config: LoraConfig) -> nn.Module:
    model = copy.deepcopy(base)
    apply_lora(model, config)
    twins.fill(model, only="_B")
    parallelize(model, Meshes.alone("cpu"), ParallelConfig())
    return model


def _in_peft(base: nn.Module, folder: Path) -> Tensor:
    import peft

    with warnings.catch_warnings():
        # peft asks transformers for attributes that transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("twin", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_peft_reproduces_the_logits_bit_for_bit(twin: str, tmp_path: Path) -> None:
    base = twins.build(twin, torch.float32).eval()
    base.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    model = _adapted(base, LoraConfig(r=4, alpha=8.0, targets=("attention", "gmm"), experts="merged"))
    export_adapter(model, tmp_path, base_model="twin")
    ours = model(input_ids=IDS, use_cache=False).logits
    assert not torch.equal(ours, base(input_ids=IDS, use_cache=False).logits)
    assert torch.equal(_in_peft(base, tmp_path), ours)


def test_grouped_adapters_agree_with_peft_within_rounding(tmp_path: Path) -> None:
    base = twins.build("gpt_oss", torch.float32).eval()
    model = _adapted(base, LoraConfig(r=4, targets=("gmm",)))
    export_adapter(model, tmp_path)
    torch.testing.assert_close(
        _in_peft(base, tmp_path), model(input_ids=IDS, use_cache=False).logits, rtol=1e-4, atol=1e-4
    )


def test_case_38_the_nesting_of_expert_weights_is_the_one_that_peft_has(tmp_path: Path) -> None:
    """Exported keys are exactly those of a model that PEFT itself adapted."""
    import peft

    base = twins.build("qwen3_moe", torch.float32)
    model = _adapted(base, LoraConfig(r=4, targets=("q_proj", "gmm")))
    export_adapter(model, tmp_path)
    from safetensors.torch import load_file

    ours = {k: v.shape for k, v in load_file(tmp_path / "adapter_model.safetensors").items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(
            copy.deepcopy(base),
            peft.LoraConfig(
                r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
            ),
        )
        state = peft.get_peft_model_state_dict(theirs)
    assert ours == {k: v.shape for k, v in state.items()}


def test_case_32_every_exported_number_is_there(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = _adapted(twins.build("deepseek_v3", torch.float32), LoraConfig(r=4))
    export_adapter(model, tmp_path)
    for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items():
        assert (tensor != 0).double().mean() == 1.0, name


def test_an_adapter_comes_back_as_it_went(tmp_path: Path) -> None:
    base = twins.build("deepseek_v3", torch.float32)
    config = LoraConfig(r=4, targets=("attention", "mlp", "gmm"))
    model = _adapted(base, config)
    export_adapter(model, tmp_path)
    other = copy.deepcopy(base)
    apply_lora(other, config)
    load_adapter(other, tmp_path)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert torch.equal(parameter, other.get_parameter(name)), name


def test_a_foreign_or_broken_adapter_is_refused(tmp_path: Path) -> None:
    base = twins.build("qwen3_moe", torch.float32)
    export_adapter(_adapted(base, LoraConfig(r=4, targets=("q_proj",))), tmp_path)

    def load(config: LoraConfig) -> None:
        model = copy.deepcopy(base)
        apply_lora(model, config)
        load_adapter(model, tmp_path)

    load(LoraConfig(r=4, targets=("q_proj",)))
    with pytest.raises(ValueError, match="r 4 and alpha 32"):
        load(LoraConfig(r=8, targets=("q_proj",)))
    with pytest.raises(ValueError, match="targets are not the model's"):
        load(LoraConfig(r=4, targets=("k_proj",)))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(ValueError, match="no adapter"):
        load(LoraConfig(r=4, targets=("q_proj",)))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="no adapter"):
        load(LoraConfig(r=4, targets=("q_proj",)))


def test_target_modules_are_short_where_that_means_the_same(tmp_path: Path) -> None:
    base = twins.build("deepseek_v3", torch.float32)
    export_adapter(_adapted(base, LoraConfig(targets=("attention",))), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert "o_proj" in config["target_modules"]
    # the shared experts only: their names are also those of the dense first layer
    one = "model.layers.1.mlp.shared_experts.up_proj"
    export_adapter(_adapted(base, LoraConfig(targets=(one,))), tmp_path / "b")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert config["target_modules"] == [one]


def test_stacking_is_undone() -> None:
    a, b = torch.arange(60.0).view(5, 3, 4), torch.arange(30.0).view(5, 2, 3)
    assert torch.equal(unstack(stack(a, "lora_A"), "lora_A", 5), a)
    assert torch.equal(unstack(stack(b, "lora_B"), "lora_B", 5), b)
    # PEFT's own reading of lora_B, by rank and then by expert
    assert torch.equal(stack(b, "lora_B").reshape(2, 3, 5).permute(2, 0, 1), b)
