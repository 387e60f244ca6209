"""The indexer's objective inside a model's own attention, against the definition in fp64 on unabsorbed heads."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kernel_templates import interpreter
from kernel_templates.indexer.spec import Spec as Indexer
from kernel_templates.sparse_attention.spec import Spec as Attention
from onboarding.stages.package.bundle_files import hooks, indexer, sparse_attention
from onboarding.stages.package.bundle_files.indexer_training import IndexerTraining

POOL, KEPT, TOKENS, COEFFICIENT = 3, 2, 17, 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 0, "v_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16,
    "index_kpool": POOL, "index_topk": KEPT * POOL, "num_hidden_layers": 2, "layer_types": None,
    "indexer_types": ["full", "full"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.activate()


def made() -> Any:
    """GLM-5.3-Flash's attention with random parameters."""
    module = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")
    config = transformers.AutoConfig.for_model("glm5_next").text_config
    for key, value in SIZES.items():
        setattr(config, key, value)
    config._attn_implementation_internal = "eager"
    built = module.Glm5NextTextAttention(config, 0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return built


def served(module: Any, training: IndexerTraining | None, target: bool) -> SimpleNamespace:
    """The hooks in place; ``target``: the attention's kernel gives the probabilities."""
    from kernel_templates.indexer.op import op as choose
    from kernel_templates.sparse_attention.op import op as attend

    applied = SimpleNamespace(fallbacks={}, count=lambda digest, name: None, indexers=training)
    choice = Indexer(top_k=KEPT, heads=16, head_dim=16, dtype="float32")
    spec = Attention(
        heads=2, key_dim=16, value_dim=16, top_k=KEPT * POOL + 2, scale=0.25, target=target, dtype="float32"
    )
    for hook, part, name, made_spec, op in (
        (indexer, module.indexer, "indexer", choice, choose(choice)),
        (sparse_attention, module, "attention", spec, attend(spec)),
    ):
        assert hook.mismatch(made_spec.to_dict(), part, {}) is None
        swap = hooks.Swap({"spec": made_spec.to_dict(), "digest": name}, {"hook": name}, {}, name, op, applied)
        hook.install(hooks, part, swap)
    return applied


def expected(module: Any, hidden: Tensor, present: Tensor, stage: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the indexer's gradients in fp64: every head's own keys, every score, every pair of tokens."""
    module, hidden = copy.deepcopy(module).double(), hidden.double()
    with torch.no_grad():
        latent = module.q_a_layernorm(module.q_a_proj(hidden))
        q = module.q_b_proj(latent).unflatten(-1, (2, 16)).transpose(1, 2)
        k = module.kv_b_proj(module.kv_a_layernorm(module.kv_a_proj_with_mqa(hidden)))
        k = k.unflatten(-1, (2, 32)).transpose(1, 2)[..., :16]
        listed = type(module.indexer).forward(module.indexer, hidden, latent, present, None)
        chosen = torch.zeros(2, TOKENS, TOKENS + 1, dtype=torch.bool)
        chosen = chosen.scatter_(-1, torch.where(listed >= 0, listed, TOKENS).long(), True)[..., :TOKENS]
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen = causal & present[:, None] & present[..., None] if stage == "dense" else chosen
        p = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0).sum(1)
    own = module.indexer
    iq = own.wq_b(latent).unflatten(-1, (16, 16))
    ik = own.k_norm(own.wk(hidden))
    gate = hidden @ own.index_kpool_compress_gate.T
    weights = own.weights_proj(hidden) * 16**-0.5
    total, rows = hidden.new_zeros(()), 0
    for b in range(2):
        first = int(present[b].int().argmax())
        pools = (TOKENS - first) // POOL
        tokens = first + torch.arange(pools * POOL).view(pools, POOL)
        keys = ((gate[b, tokens] + own.index_kpool_compress_ape).softmax(1) * ik[b, tokens]).sum(1)
        for t in range(first, TOKENS):
            usable = [n for n in range(pools) if bool(seen[b, t, tokens[n]].all())]
            if not usable:
                continue
            scores = torch.relu(iq[b, t] @ keys[usable].T).T @ weights[b, t] * 0.25
            share = p[b, t, tokens[usable]].sum(-1)
            share = share / share.sum()
            total = total + (share * (share.log() - scores.log_softmax(-1))).sum()
            rows += 1
    loss = total / rows
    found = torch.autograd.grad(COEFFICIENT * loss, list(own.parameters()))
    return loss.detach(), dict(zip(dict(own.named_parameters()), found, strict=True))


@pytest.mark.parametrize("stage", ["sparse", "dense"])
@pytest.mark.parametrize("target", [True, False])
def test_gradients_reach_the_indexer_and_nothing_else(stage: str, target: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, TOKENS, 32, generator=generator)
    weights = torch.randn(2, TOKENS, 32, generator=generator)
    present = torch.ones(2, TOKENS, dtype=torch.bool)
    present[1, :2] = False
    module = made()
    loss, gradients = expected(module, hidden, present, stage)

    plain = copy.deepcopy(module)
    served(plain, None, target)
    (plain(hidden, present)[0] * weights).sum().backward()
    assert all(p.grad is None for p in plain.indexer.parameters())

    training = IndexerTraining(stage, COEFFICIENT)
    applied = served(module, training, target)
    out = module(hidden, present)[0]
    (out * weights).sum().backward()
    assert not applied.fallbacks
    assert float(training.losses["attention"]) == pytest.approx(float(loss), rel=1e-5)
    for name, parameter in module.indexer.named_parameters():
        assert parameter.grad is not None, name
        difference = (parameter.grad.double() - gradients[name]).norm()
        assert difference <= 1e-4 * gradients[name].norm(), name
    if stage == "sparse":  # the choice is the same: so is all that the rest of the model gets
        for name, parameter in module.named_parameters():
            if not name.startswith("indexer"):
                assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name


def test_a_frozen_model_s_indexer_learns() -> None:
    """Warm-up: nothing before the attention has a gradient, and the loss still arrives."""
    module = made()
    module.requires_grad_(False)
    module.indexer.requires_grad_(True)
    served(module, IndexerTraining("dense", 1.0), False)
    hidden = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(4))
    module(hidden, torch.ones(2, TOKENS, dtype=torch.bool))[0].sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in module.indexer.parameters())
    assert module.o_proj.weight.grad is None


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage is one of dense, sparse"):
        IndexerTraining("warm", 1.0)
