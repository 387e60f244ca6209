"""Our grouped experts against every kind of experts class that transformers has, its own eager code as reference."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernel_templates.tolerance import assert_close
from runtime.experts.compute import run_experts
from runtime.experts.layer import ExpertsLayer
from runtime.experts.shared import SharedExperts
from runtime.experts.sites import find_experts
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.prove import twins

EXPERTS, WIDTH, INNER, TOKENS, SLOTS = 5, 6, 4, 13, 2
KINDS = {
    "qwen3_moe": "Qwen3MoeExperts",
    "gpt_oss": "GptOssExperts",
    "aria": "AriaExperts",
    "muse_spark": "MuseSparkExperts",
    "nemotron_h": "NemotronHExperts",
    "glm5_next": "Glm5NextTextExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "inkling2": "Inkling2Experts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
}


class _Config(SimpleNamespace):
    """Every name under which transformers' configurations keep these sizes."""

    def __init__(self) -> None:
        super().__init__(_experts_implementation="eager")
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            setattr(self, name, EXPERTS)
        for name in ("intermediate_size", "moe_intermediate_size"):
            setattr(self, name, INNER)
        self.hidden_size, self.hidden_act, self.mlp_hidden_act = WIDTH, "silu", "relu2"
        self.moe_hidden_size, self.moe_latent_size, self.rms_norm_eps = WIDTH, None, 1e-6
        self.swiglu_alpha, self.swiglu_limit, self.mlp_bias = 1.702, 0.5, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0.5  # limits and scales of single models


def _experts(kind: str) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    experts: nn.Module = getattr(module, KINDS[kind])(_Config()).double()
    twins.fill(experts)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if "bias" in name:
                parameter.fill_(0.1)
    return experts


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_experts_are_the_models_own(kind: str) -> None:
    experts = _experts(kind)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    index = torch.rand(TOKENS, EXPERTS - 1, generator=generator).topk(SLOTS).indices  # the last expert gets none
    weights = torch.rand(TOKENS, SLOTS, dtype=torch.float64, generator=generator)
    upstream = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    counts = torch.bincount(index.reshape(-1), minlength=EXPERTS).tolist()
    found: list[dict[str, Tensor]] = []
    for ours in (True, False):
        experts.zero_grad()
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if ours:
            y = run_experts(experts, dict(experts.named_parameters()), inputs[0], index, inputs[1], counts, EXPERTS)
        else:
            y = experts(inputs[0], index, inputs[1])
        (y * upstream).sum().backward()  # type: ignore[no-untyped-call]
        grads = {n: p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        found.append({"y": y.detach(), "x": inputs[0].grad, "weights": inputs[1].grad, **grads})
    # one class works in fp32 whatever its dtype
    limit = 1e-6 if kind in ("openai_privacy_filter", "inkling2", "muse_spark") else 1e-12
    for name, expected in found[1].items():
        assert_close(name, found[0][name], expected, limit)


def test_slots_without_an_expert_read_nothing() -> None:
    experts = _experts("qwen3_moe")
    x = torch.full((3, WIDTH), float("nan"), dtype=torch.float64)
    x[1] = 1.0
    index = torch.tensor([[-1, -1], [2, -1], [-1, -1]])
    weights = torch.ones(3, 2, dtype=torch.float64)
    y = run_experts(experts, dict(experts.named_parameters()), x, index, weights, [0, 0, 1, 0, 0], EXPERTS)
    assert y[[0, 2]].abs().sum() == 0
    assert y[1].isfinite().all()


def test_another_implementation_is_called_not_replaced() -> None:
    """A bundle registers its kernel under a name of its own; it gets local tensors and "no expert" as E."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = _experts("qwen3_moe")
    seen: list[Any] = []

    def kernel(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        seen.append((type(self.gate_up_proj), self.num_experts, index))
        return x * 2

    ALL_EXPERTS_FUNCTIONS["test-kernel"] = kernel
    try:
        experts.config._experts_implementation = "test-kernel"  # type: ignore[union-attr]
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        index = torch.tensor([[0, -1], [1, 2]])
        tensors = {n: p.detach()[:3] for n, p in experts.named_parameters()}
        y = run_experts(experts, tensors, x, index, torch.ones(2, 2), [1, 1, 1], 3)
    finally:
        del ALL_EXPERTS_FUNCTIONS["test-kernel"]
    assert torch.equal(y, x * 2)
    kind, count, given = seen[0]
    assert kind is Tensor
    assert count == 3
    assert given.tolist() == [[0, 3], [1, 2]]


def test_the_shared_expert_runs_once_and_early() -> None:
    model = twins.build("deepseek_v3", torch.float64)
    site = find_experts(model)[0]
    shared = SharedExperts.find(site.block)
    assert shared is not None
    shared.install()
    calls: list[str] = []
    original = shared._original

    def counted(x: Tensor) -> Tensor:
        calls.append("shared")
        return original(x)

    shared._original = counted
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = original(x)
    shared.expect(x)
    shared.run_early()
    assert torch.equal(shared.module(x), expected)
    assert calls == ["shared"]
    shared.expect(x)
    shared.run_early()
    flat = x.view(-1, 16)  # blocks that flatten first get the same result in their shape
    assert torch.equal(shared.module(flat), expected.view(-1, 16))
    assert calls == ["shared"] * 2
    shared.expect(x)
    shared.run_early()
    assert not torch.equal(shared.module(x + 1), expected)  # another input is computed
    assert calls == ["shared"] * 4
    assert not torch.equal(shared.module(x + 2), expected)


def test_a_block_without_one_shared_expert_has_none() -> None:
    assert SharedExperts.find(find_experts(twins.build("qwen3_moe", torch.float32))[0].block) is None


def test_dense_models_have_no_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    parallelize(model, Meshes.alone("cpu"), ParallelConfig())
    assert find_experts(model) == []
    layers: list[ExpertsLayer] = model.__dict__["_onboard_parallel"].layers
    assert layers == []
