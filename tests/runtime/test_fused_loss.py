"""A bundle's loss kernel inside the runtime: the same loss and gradients as logits in chunks, with no logits at all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernel_templates import interpreter
from kernel_templates.linear_cross_entropy.spec import Spec
from onboarding.stages.package.bundle_files.apply import Applied, apply
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.memory.loss import install_loss
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes, build_meshes
from runtime.parallel.shard import parallelize
from tests.bundle.test_apply_loss import TARGET, bundle, tiny

VOCABULARY = 90
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "gemma2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 3.0}, {"softcap": 3.0}),
}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.activate()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def batch() -> dict[str, Tensor]:
    ids = torch.arange(2 * 17).reshape(2, 17) * 37 % VOCABULARY
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100
    return {"input_ids": ids, "position_ids": torch.arange(17).expand(2, 17), "labels": labels}


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch())
    (loss / 29).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: getattr(g, "full_tensor", lambda g=g: g)().clone() for n, g in whole.items()}


def pair(
    folder: Path, name: str, meshes: Meshes, lora: LoraConfig | None = None
) -> tuple[nn.Module, nn.Module, Applied]:
    """The same sharded model with the loss in chunks and with the kernel."""
    cls, config, spec = MODELS[name]
    plain: nn.Module = tiny(name, **config)
    if lora is not None:
        apply_lora(plain, lora)
        for parameter_name, parameter in plain.named_parameters():
            if parameter_name.endswith("lora_B"):
                nn.init.normal_(parameter, std=0.1)
    models = [plain, copy.deepcopy(plain)]
    for model in models:
        install_loss(model, 8)
        parallelize(model, meshes, ParallelConfig())
    chosen = Spec(hidden=32, vocabulary=VOCABULARY, dtype="float32", reduction="mean", **spec)
    applied = apply(models[1], bundle=bundle(folder, chosen, TARGET.format(name, cls)), verify=False)
    return models[0], models[1], applied


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, targets=("attention",))])
def test_the_kernel_takes_the_whole_loss(tmp_path: Path, name: str, lora: LoraConfig | None) -> None:
    chunks, fused, applied = pair(tmp_path, name, Meshes.alone("cpu"), lora)
    expected, gradients = step(chunks)
    loss, found = step(fused)
    assert [list(modules.values()) for modules in applied.calls.values()] == [[1]]
    assert applied.fallbacks == {}
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert found.keys() == gradients.keys()
    for parameter in gradients:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=1e-4, atol=1e-6)


def test_a_sharded_head_gets_its_gradient(tmp_path: Path, group: None) -> None:
    meshes = build_meshes(ParallelConfig(), 1, "cpu")
    chunks, fused, applied = pair(tmp_path, "llama", meshes)
    expected, gradients = step(chunks)
    for _ in range(2):  # the second step finds what the first one left
        loss, found = step(fused)
    assert [list(modules.values()) for modules in applied.calls.values()] == [[2]]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert found.keys() == gradients.keys()
    assert "lm_head.weight" in found
    for parameter in gradients:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=1e-4, atol=1e-6)


def test_a_head_with_an_adapter_keeps_its_logits(tmp_path: Path) -> None:
    chunks, fused, applied = pair(tmp_path, "llama", Meshes.alone("cpu"), LoraConfig(r=4, targets=("lm_head",)))
    expected, gradients = step(chunks)
    loss, found = step(fused)
    assert applied.calls == {}
    assert "adapter" in applied.fallbacks[""]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert set(found) == {"lm_head.lora_A", "lm_head.lora_B"}
    for parameter in gradients:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=1e-4, atol=1e-6)


def test_logits_alone_are_logits(tmp_path: Path) -> None:
    chunks, fused, _ = pair(tmp_path, "llama", Meshes.alone("cpu"))
    given = {k: v for k, v in batch().items() if k != "labels"}
    torch.testing.assert_close(fused(**given).logits, chunks(**given).logits, rtol=1e-6, atol=1e-7)
