"""Units, dtypes and memory of a sharded model, on a group of ranks that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.experts.replay import replay_contexts
from runtime.experts.routing import LoadRouting
from runtime.lora.adapter import apply_lora, is_adapter
from runtime.lora.config import LoraConfig
from runtime.parallel.clip import clip_grad_norm
from runtime.parallel.config import BalanceConfig, ParallelConfig
from runtime.parallel.gradients import after_optimizer_step, counting, finish_gradients
from runtime.parallel.meshes import Meshes, build_meshes
from runtime.parallel.shard import parallelize
from runtime.parallel.state import state_of
from runtime.prove import twins

Ranks = Callable[[int], None]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Start a group of that many ranks in which this is rank 0 and nothing is sent."""

    def start(count: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_units_of_a_block(ranks: Ranks) -> None:
    ranks(8)
    model = twins.build("deepseek_v3", torch.float32)
    config = ParallelConfig(ep=4)
    parallelize(model, build_meshes(config, 8, "cpu"), config)
    assert _units(model) == [
        "",
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.1.mlp.experts",
        "lm_head",
    ]
    expert = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    dense = model.get_parameter("model.layers.1.mlp.shared_experts.down_proj.weight")
    assert isinstance(expert, DTensor)
    assert isinstance(dense, DTensor)
    assert expert.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert dense.device_mesh.mesh_dim_names == ("fsdp",)
    assert expert.to_local().numel() == expert.numel() // 8
    assert model.get_parameter("model.layers.1.mlp.experts.down_proj").shape[0] == twins.EXPERTS


def test_cases_27_29_tied_embeddings_stay_one_tensor_in_one_unit(ranks: Ranks) -> None:
    ranks(4)
    model = twins.build("qwen3_moe", torch.float32)
    parallelize(model, build_meshes(ParallelConfig(), 4, "cpu"), ParallelConfig())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert "lm_head" not in _units(model)
    assert "model.embed_tokens" not in _units(model)


def test_case_30_an_untied_pair_is_not_reduced_together(ranks: Ranks) -> None:
    ranks(4)
    model = twins.build("gpt_oss", torch.float32)
    parallelize(model, build_meshes(ParallelConfig(), 4, "cpu"), ParallelConfig())
    assert {"lm_head", "model.embed_tokens"} < set(_units(model))


def test_fp32_parameters_stay_fp32_under_bf16(ranks: Ranks) -> None:
    ranks(4)
    model = twins.build("kimi_linear", torch.float32)
    parallelize(model, build_meshes(ParallelConfig(), 4, "cpu"), ParallelConfig(), param_dtype=torch.bfloat16)
    held = state_of(model).replicated
    names = {n for n, p in model.named_parameters() if any(p is h for h in held)}
    assert {n.rpartition(".")[2] for n in names} == {"A_log", "dt_bias", "weight"}
    assert all("gate.weight" in n for n in names if n.endswith(".weight"))  # routers
    assert all(not isinstance(p, DTensor) and p.dtype == torch.float32 for p in held)


def test_a_large_fp32_router_is_sharded_in_a_unit_of_its_own(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.parallel.shard.REPLICATE_BELOW", 100)
    ranks(4)
    model = twins.build("deepseek_v3", torch.float32)
    parallelize(model, build_meshes(ParallelConfig(), 4, "cpu"), ParallelConfig(), param_dtype=torch.bfloat16)
    assert "model.layers.1.mlp.gate" in _units(model)
    assert state_of(model).replicated == []


def test_experts_that_do_not_divide_are_sharded_by_width(ranks: Ranks) -> None:
    ranks(16)
    model = twins.build("qwen3_moe", torch.float32)  # 8 experts over 4 ranks, their 2 over 4 more
    config = ParallelConfig(ep=4)
    parallelize(model, build_meshes(config, 16, "cpu"), config)
    weight = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert isinstance(weight, DTensor)
    assert tuple(weight.to_local().shape) == (2, 24 // 4, 16)


def test_replicas_give_three_mesh_dimensions(ranks: Ranks) -> None:
    ranks(8)
    config = ParallelConfig(ep=2, dp_replicate=2)
    meshes = build_meshes(config, 8, "cpu")
    assert meshes.data is not None
    assert meshes.expert_data is not None
    assert tuple(meshes.data.shape) == (2, 4)
    assert tuple(meshes.expert_data.shape) == (2, 2)


def test_a_layout_that_does_not_fit_the_model_is_refused(ranks: Ranks) -> None:
    ranks(16)
    config = ParallelConfig(ep=16)
    with pytest.raises(ValueError, match=r"ep 16 does not divide 8 experts; use one of \[1, 2, 4, 8\]"):
        parallelize(twins.build("qwen3_moe", torch.float32), build_meshes(config, 16, "cpu"), config)


def test_mixed_precision_without_a_group_says_what_to_start() -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 1"):
        parallelize(
            twins.build("qwen3_moe", torch.float32),
            Meshes.alone("cpu"),
            ParallelConfig(),
            param_dtype=torch.bfloat16,
        )


def test_the_loop_is_told_to_parallelize_first() -> None:
    with pytest.raises(ValueError, match="parallelize"):
        after_optimizer_step(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("lora", "layout"),
    [
        (True, ParallelConfig(ep=64, hierarchical="across_first", ranks_per_node=8)),
        (False, ParallelConfig(ep=64, dispatch_chunks=2, balance=BalanceConfig(method="bias", aux_loss=0.01))),
    ],
    ids=["lora-two-hops", "full-balanced"],
)
def test_128_ranks_step_on_fake_tensors(ranks: Ranks, lora: bool, layout: ParallelConfig) -> None:
    """Nothing is read from a tensor: sizes come from a load."""
    ranks(128)
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2,
        num_experts=128,
        num_experts_per_tok=8,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="grouped_mm", dtype=torch.bfloat16
        )
    model.train()
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": False, "context_fn": replay_contexts}
    )
    if lora:
        apply_lora(model, LoraConfig(targets=("attention", "gmm")))
    meshes = build_meshes(layout, 128, "cpu")
    parallelize(
        model,
        meshes,
        layout,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        routing=LoadRouting(128, load=list(range(1, 129))),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        with counting(model, global_tokens=1024.0 * 128):
            logits = model(input_ids=torch.zeros(1, 1024, dtype=torch.int64), use_cache=False).logits
            (logits.float().logsumexp(-1).sum() / 1024).backward()
        finish_gradients(model)
        clip_grad_norm(trained.values(), meshes, 1.0)
        torch.optim.AdamW(list(trained.values()), foreach=False).step()
        report = after_optimizer_step(model)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in trained.values())
    assert lora == all(is_adapter(n) for n in trained)
    assert report is not None
    assert report.load.shape == (2, 128)
    expert = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert isinstance(expert, DTensor)
    assert tuple(expert.to_local().shape) == (1, 1536, 2048)  # two experts a rank, one after eFSDP
    layer = state_of(model).layers[0]
    assert layer.transport is not None
    assert layer.transport.traffic.bytes[0] > 0
