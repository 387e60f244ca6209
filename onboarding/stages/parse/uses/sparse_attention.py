"""Latent attention over the keys that an indexer chooses: proven on a small instance of the module's own class."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kernel_templates.sparse_attention.reference import reference
from kernel_templates.sparse_attention.spec import Spec
from onboarding.stages.package.bundle_files.sparse_attention import MASK_MAKER, Served, mismatch
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import FP32_ROUNDING, relative_error

_SHRINK = 16
"""All sizes shrink alike, so that sums of sizes stay sums."""
_TOKENS, _TOP_K = 22, 5


def is_sparse_latent_attention(module: nn.Module) -> bool:
    """Whether a module expands latents to keys and values and has an indexer, its own or another layer's."""
    return callable(getattr(module, "expand_kv", None)) and hasattr(module, "indexer")


def prove_sparse_attention(module: nn.Module, leaf: LeafCall, dtype: str) -> Spec | None:
    """The attention that a module computes of its latents and its choice of keys, or None.

    A small instance runs twice, once with its own masked attention and once with the family's reference in its place:
    outputs and the gradients of its input and of every parameter must agree.
    """
    facts: Any = module
    try:
        spec = Spec(
            heads=leaf.facts["query_heads"],
            key_dim=facts.kv_lora_rank,
            value_dim=facts.kv_lora_rank,
            rope=facts.qk_rope_head_dim > 0,
            rope_dim=facts.qk_rope_head_dim,
            top_k=_top_k(module),
            scale=float(facts.scaling),
            sink=isinstance(getattr(module, "sinks", None), Tensor),
            dtype=dtype,
        )
        if mismatch(spec.to_dict(), module, {}) is not None:
            return None
        clone = _small(module)
        own = _run(clone, None, spec)
        served = _run(clone, spec.resized(dtype="float32"), spec)
    except Exception:  # other names, another call: then it is not this operator
        return None
    if own.keys() != served.keys():
        return None
    return spec if all(relative_error(served[n], own[n]) <= FP32_ROUNDING for n in own) else None


def _top_k(module: Any) -> int:
    """Keys that the indexer keeps; a layer without one takes over what the configuration says.

    An indexer of pools adds the tokens of the pool that is not complete yet.
    """
    stated = module.config if module.indexer is None else module.indexer
    found: int = stated.index_topk
    tail: int = stated.index_kpool - 1 if getattr(stated, "index_kpool_always_select_tail", False) else 0
    return found + tail


def _small(module: Any) -> Any:
    """A small instance with real parameters, whose own attention is eager."""
    parts = [m for m in module.modules() if not isinstance(m, nn.Linear)]
    sizes = {v for m in parts for v in vars(m).values() if type(v) is int and v >= _SHRINK and v % _SHRINK == 0}
    sizes |= {size for p in module.parameters() for size in p.shape if size % _SHRINK == 0}
    shrunk = {size: size // _SHRINK for size in sizes}
    # a projection to heads has a product of two sizes, each of which shrinks
    wide = (module.qk_nope_head_dim + module.v_head_dim, module.qk_head_dim, module.v_head_dim)
    products = [(module.num_heads, width) for width in wide]
    products += [] if module.indexer is None else [(module.indexer.n_heads, module.indexer.head_dim)]
    shrunk |= {heads * width: heads * width // _SHRINK**2 for heads, width in products}
    clone = small_instance(module, shrunk, torch.Generator().manual_seed(41))
    clone.config = copy.copy(module.config)
    clone.config._attn_implementation_internal = "eager"
    if clone.indexer is not None:
        clone.indexer.index_topk = _TOP_K
    with torch.no_grad():
        for parameter in clone.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2 / parameter.shape[-1] ** 0.5)
    return clone.eval()


def _run(clone: Any, served: Spec | None, spec: Spec) -> dict[str, Tensor]:
    """Output and gradients of one call, by the module's own attention or by the family's reference."""
    generator = torch.Generator().manual_seed(43)
    hidden = torch.randn(2, _TOKENS, clone.q_a_proj.in_features, generator=generator).requires_grad_()
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    more: dict[str, Any] = {}
    if clone.indexer is None:
        best = torch.rand(2, _TOKENS, _TOKENS, generator=generator).masked_fill(~mask[:, 0], -1.0)
        more["prev_topk_indices"] = best.topk(_TOP_K, -1).indices.int()
    if hasattr(clone, MASK_MAKER):  # then it is asked which tokens are there
        more["attention_mask"] = torch.ones(2, _TOKENS, dtype=torch.bool)
    else:
        more["attention_mask"] = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if clone.qk_rope_head_dim:
        angle = torch.randn(1, _TOKENS, clone.qk_rope_head_dim // 2, generator=generator).repeat(2, 1, 2)
        more["position_embeddings"] = (angle.cos(), angle.sin())

    def attend(**tensors: Tensor) -> tuple[Tensor, ...]:
        assert served is not None
        return (reference(dict(tensors), served)["o"],)

    def call() -> Tensor:
        with quiet():
            out: Tensor = clone(hidden, **more)[0]
        return out

    if served is None:
        out = call()
    else:
        with Served(clone, attend, float(spec.scale or 1.0)):
            out = call()
    weights = torch.randn(out.shape, generator=generator)
    leaves = {"hidden": hidden, **dict(clone.named_parameters())}
    found = torch.autograd.grad(out, list(leaves.values()), weights, allow_unused=True)
    return {"out": out.detach(), **{n: g for n, g in zip(leaves, found, strict=True) if g is not None}}
