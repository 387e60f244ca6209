"""The choice of keys for sparse attention: proven on an instance of the module's own class with real parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kernel_templates.indexer.reference import reference
from kernel_templates.indexer.spec import Spec
from onboarding.stages.package.bundle_files.indexer import Candidates, candidates, choice, mismatch, placed, pooled
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.uses.instance import small_instance

_TOKENS, _KEYS, _POOLS = 41, 9, 3
_PADDED = 3
"""Tokens of padding in front of the second sequence."""


def is_indexer(module: nn.Module) -> bool:
    """Whether a module has the projections of a lightning indexer."""
    return all(hasattr(module, name) for name in ("wq_b", "wk", "weights_proj", "k_norm", "index_topk"))


def prove_indexer(module: nn.Module, tokens: int, dtype: str) -> Spec | None:
    """The choice that a module makes, or None.

    Two sequences are chosen for twice, by the module itself and by the family's reference on what the bundle's hook
    hands it: every query must get the same keys. Sizes stay as they are: with so many heads no two scores are equal.

    Args:
        module: of fake tensors.
        tokens: of the traced sequence.
        dtype: of the model.
    """
    facts: Any = module
    try:
        size = facts.index_kpool if pooled(module) else 1
        spec = Spec(
            top_k=facts.index_topk // size,
            heads=facts.n_heads,
            head_dim=facts.head_dim,
            context=max(tokens // size, 1),
            dtype=dtype,
        )
        generator = torch.Generator().manual_seed(47)
        own = small_instance(module, {}, generator).eval()
        own.index_topk = _POOLS * size if pooled(module) else _KEYS
        if mismatch(spec.to_dict(), own, {}) is not None:
            return None
        return spec if _same_choice(own, spec, generator) else None
    except Exception:  # other names, another call: then it is not this operator
        return None


def _same_choice(own: Any, spec: Spec, generator: torch.Generator) -> bool:
    tokens = _TOKENS + (8 * own.index_kpool if pooled(own) else 0)
    present = torch.ones(2, tokens, dtype=torch.bool)
    present[1, :_PADDED] = False
    seen = present[:, None, :] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    given: dict[str, Any] = {
        "hidden_states": torch.randn(2, tokens, own.wk.in_features, generator=generator),
        "q_resid": torch.randn(2, tokens, own.wq_b.in_features, generator=generator),
        "attention_mask": present if pooled(own) else seen,
    }
    parameters = inspect.signature(type(own).forward).parameters
    if "position_embeddings" in parameters:
        angle = torch.randn(1, tokens, own.qk_rope_head_dim // 2, generator=generator).repeat(2, 1, 2)
        given["position_embeddings"] = (angle.cos(), angle.sin())
    more = {n: None for n in ("position_ids", "cache") if n in parameters}

    def attend(**tensors: Tensor) -> tuple[Tensor, ...]:
        found = reference(dict(tensors), spec)
        return found["scores"], found["index"].int(), found["count"].int()

    with torch.no_grad(), quiet():
        theirs = own(**given, **more)
        found = candidates(own, given, "" if pooled(own) else placed(own) or "")
        if not isinstance(found, Candidates):
            return False
        _, index, count = choice(attend, found, found.slots)
        ours = found.listed(index, count)
    listed = [_listed(index, tokens) & seen for index in (theirs, ours)]
    return theirs.shape == ours.shape and torch.equal(*listed)


def _listed(index: Tensor, tokens: int) -> Tensor:
    """Which tokens stand in the lists [B, S, K]: bool [B, S, T]; numbers below 0 are none."""
    rows = torch.zeros(*index.shape[:2], tokens + 1, dtype=torch.bool)
    return rows.scatter_(-1, torch.where(index >= 0, index, tokens).long(), True)[..., :tokens]
