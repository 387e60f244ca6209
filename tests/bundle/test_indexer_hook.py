"""The indexer hook on transformers' own modules: the same visible keys, full lists, and calls that it leaves alone."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from kernel_templates import interpreter
from kernel_templates.indexer.spec import Spec
from onboarding.stages.package.bundle_files import hooks, indexer

SIZES: dict[str, Any] = {
    "hidden_size": 32, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
}  # fmt: skip
MODELS = {
    "deepseek_v32": ("DeepseekV32Indexer", "first"),
    "glm_moe_dsa": ("GlmMoeDsaIndexer", "first"),
    "axk2": ("AXK2Indexer", "first"),
    "hy_v4": ("HYV4Indexer", "last"),
}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.activate()


def made(name: str, dtype: torch.dtype) -> Any:
    """The model's indexer with random parameters."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = transformers.AutoConfig.for_model(name)
    for key, value in SIZES.items():
        setattr(config, key, value)
    built = getattr(module, MODELS[name][0])(config, 0).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]:
    """Hidden states, latents, angles and a mask: two sequences, the second with four keys of padding in front."""
    generator = torch.Generator().manual_seed(6)
    hidden, latent = (torch.randn(2, 30, n, generator=generator).to(dtype) for n in (32, 24))
    angle = torch.randn(2, 30, 4, generator=generator).repeat(1, 1, 2)
    mask = torch.ones(2, 30, 30, dtype=torch.bool).tril()
    mask[1, :, :4] = False
    return hidden, latent, (angle.cos().to(dtype), angle.sin().to(dtype)), mask


def swapped(module: nn.Module, dtype: torch.dtype) -> tuple[Any, Any]:
    """The undo function and what was counted."""
    from kernel_templates.indexer.op import op  # kernels are decorated for the interpreter once it is active

    spec = Spec(top_k=6, heads=16, head_dim=16, dtype=str(dtype).removeprefix("torch."))
    assert indexer.mismatch(spec.to_dict(), module, {}) is None
    counted: list[str] = []
    applied = SimpleNamespace(fallbacks={}, count=lambda digest, name: counted.append(name), counted=counted)
    swap = hooks.Swap({"spec": spec.to_dict(), "digest": "d"}, {"hook": "indexer"}, {}, "layer", op(spec), applied)
    return indexer.install(hooks, module, swap), applied


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_visible_keys_are_chosen(name: str, dtype: torch.dtype) -> None:
    module = made(name, dtype)
    assert indexer.placed(module) == MODELS[name][1]
    hidden, latent, angles, mask = given(dtype)
    for shown in (mask, torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)):
        own = module(hidden, latent, angles, shown, None, None)
        undo, applied = swapped(module, dtype)
        found = module(hidden, latent, angles, shown, None, None)
        undo()
        assert applied.counted == ["layer"]
        assert not applied.fallbacks
        assert found.dtype == own.dtype
        assert found.shape == own.shape
        listed = [torch.zeros_like(mask).scatter_(-1, index.long(), True) for index in (own, found)]
        assert torch.equal(listed[0] & mask, listed[1] & mask)
        # no key twice, none past the end
        assert torch.equal(listed[1].sum(-1), torch.full((2, 30), 6))
    assert "forward" not in vars(module)


def of_pools(size: int, dtype: torch.dtype) -> Any:
    """GLM-5.3-Flash's indexer with random parameters: three pools of ``size`` tokens are chosen."""
    module = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")
    config = transformers.AutoConfig.for_model("glm5_next").text_config
    for key, value in (SIZES | {"index_kpool": size, "index_topk": 3 * size, "qk_rope_head_dim": 0}).items():
        setattr(config, key, value)
    built = module.Glm5NextTextIndexer(config, 0).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kernels", ["choice", "choice and pools"])
def test_pools_and_the_open_one(size: int, kernels: str) -> None:
    """The same tokens for every query: padding before, behind and none, and a sequence shorter than a pool."""
    from kernel_templates.indexer.op import op

    module = of_pools(size, torch.float32)
    hidden, latent, _, _ = given(torch.float32)
    undo, applied = swapped(module, torch.float32)
    if kernels == "choice and pools":
        spec = Spec(operation="compression", top_k=3, head_dim=16, pool=size, dtype="float32")
        assert indexer.mismatch(spec.to_dict(), module, {}) is None
        swap = hooks.Swap(
            {"spec": spec.to_dict(), "digest": "p"}, {"hook": "indexer_pools"}, {}, "pools", op(spec), applied
        )
        undo_pools = indexer.install(hooks, module, swap)
    for tokens, before, behind in ((30, 0, 0), (30, 5, 0), (30, 0, 7), (2, 0, 0)):
        present = torch.ones(2, tokens, dtype=torch.bool)
        present[1, :before] = False
        present[1, tokens - behind :] = False
        found = module(hidden[:, :tokens], latent[:, :tokens], present, None)
        own = type(module).forward(module, hidden[:, :tokens], latent[:, :tokens], present, None)
        assert found.shape == own.shape
        assert found.dtype == own.dtype
        assert torch.equal(found.sort(-1).values, own.sort(-1).values)
        # chosen ones first, so that the attention stops early
        assert torch.equal((found >= 0).int().cummin(-1).values.bool(), found >= 0)
    assert set(applied.counted) == {"layer", *(["pools"] if kernels != "choice" else [])}
    assert not applied.fallbacks
    undo()
    if kernels == "choice and pools":
        undo_pools()
    assert not {"forward", indexer.POOLER} & set(vars(module))


def test_padding_between_tokens_is_left_to_the_module() -> None:
    module = of_pools(4, torch.bfloat16)
    hidden, latent, _, _ = given(torch.bfloat16)
    present = torch.ones(2, 30, dtype=torch.bool)
    present[0, 7] = False
    own = module(hidden, latent, present, None)
    undo, applied = swapped(module, torch.bfloat16)
    assert torch.equal(module(hidden, latent, present, None), own)
    assert applied.fallbacks == {"layer": "padding between tokens"}
    present[0, 7] = True
    found = module(hidden, latent, present, None)
    undo()
    assert torch.equal(found.sort(-1).values, module(hidden, latent, present, None).sort(-1).values)


def test_other_pools_are_refused() -> None:
    spec = Spec(top_k=6).to_dict()
    module = of_pools(4, torch.float32)
    assert indexer.mismatch(spec, module, {}) is None

    class Later(type(module)):  # type: ignore[misc]
        def get_pooled_states(self, packed_states: Tensor) -> tuple[Tensor, ...]:
            keys, tokens, valid = super().get_pooled_states(packed_states)
            return keys.roll(1, 1), tokens, valid

    module.__class__ = Later
    assert indexer.mismatch(spec, module, {}) == "it chooses other keys"
    assert indexer.mismatch(spec | {"operation": "compression"}, module, {}) == "it makes no pools, or others"


def test_a_cache_and_a_mask_with_gaps_are_left_to_the_module() -> None:
    module = made("deepseek_v32", torch.float32)
    hidden, latent, angles, mask = given(torch.float32)
    mask[0, :, 3] = False
    own = module(hidden, latent, angles, mask, None, None)
    undo, applied = swapped(module, torch.float32)
    assert torch.equal(module(hidden, latent, angles, mask, None, None), own)
    assert applied.fallbacks == {"layer": "a mask with gaps"}
    cache = SimpleNamespace(update_indexer=lambda k, layer: k)
    module(hidden, latent, angles, mask, None, cache)
    assert applied.fallbacks == {"layer": "a cache of keys"}
    undo()


def test_modules_that_choose_otherwise_are_refused() -> None:
    spec = Spec(top_k=6).to_dict()
    module = made("deepseek_v32", torch.float32)
    assert indexer.mismatch({**spec, "activation": "none"}, module, {}) == "the kernel scores in another way"
    assert indexer.mismatch(spec, nn.Linear(3, 3), {}) == "projections by other names"

    class Contrary(type(module)):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *more: Any) -> Tensor:
            found: Tensor = super().forward(-hidden, *more)
            return found

    module.__class__ = Contrary
    assert indexer.mismatch(spec, module, {}) in ("it chooses other keys", "its forward: LookupError")


def test_empty_places_are_filled_with_keys_that_are_not_seen() -> None:
    index = torch.tensor([[[2, 3, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 4]]], dtype=torch.int32)
    begin, end = torch.tensor([[2, 5, 0]], dtype=torch.int32), torch.tensor([[4, 5, 5]], dtype=torch.int32)
    found = indexer.filled(index, begin, end, torch.tensor([[2, 0, 4]], dtype=torch.int32))
    assert found.tolist() == [[[2, 3, 0, 1], [0, 1, 2, 3], [0, 1, 2, 4]]]
