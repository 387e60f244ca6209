"""How an indexer learns: its scores follow the attention's own distribution over the keys that it chose.

For each query, over its chosen keys (or pools): KL(p || softmax(scores)), p the attention's probabilities summed over
heads. Stage ``dense`` is the warm-up: every key that a query sees is chosen, so attention is dense and the loss is over
all of them; freeze everything but the indexers. Stage ``sparse`` is the training that follows. The indexer's inputs are
detached: it learns from this loss alone, and the rest of the model does not see it. The loss rides on the attention's
output, so that the model's own loss stays what it is and nothing has to be added to it.

Source: DeepSeek-AI, "DeepSeek-V3.2-Exp" (2025), section 2.1, equations 3 and 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STAGES = ("dense", "sparse")
CHOICE = "onboard_choice"
"""Attribute of an indexer: what it chose last, until the attention has attended to it."""
QUERIES = 128
"""Queries whose probabilities are computed at once where the attention's kernel gives none."""


class IndexerTraining:
    """What is asked of the indexers, and their last losses."""

    def __init__(self, stage: str, coefficient: float) -> None:
        if stage not in STAGES:
            raise ValueError(f"stage is one of {', '.join(STAGES)}, not {stage!r}")
        self.stage, self.coefficient = stage, coefficient
        self.losses: dict[str, Tensor] = {}
        """Attention module's name -> mean over its queries, without the coefficient."""

    def note(self, indexer: nn.Module, scores: Tensor, count: Tensor, pool: int) -> None:
        """Keep a choice: scores [B, S, K] with their graph, count [B, S], tokens of a key."""
        vars(indexer)[CHOICE] = (scores, count, pool)

    def attached(
        self,
        name: str,
        indexer: nn.Module | None,
        o: Tensor,
        tensors: dict[str, Tensor],
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        """The attention's output with the loss on it, if this layer's indexer made the choice.

        Args:
            name: of the attention module.
            indexer: None where the choice is another layer's, whose own attention trains it.
            o: [T, H, V]
            tensors: what the attention's kernel was given.
            scale: on the scores.
            target: [T, K'] from the kernel; None to compute it here.
        """
        choice = None if indexer is None else vars(indexer).pop(CHOICE, None)
        if choice is None or not choice[0].requires_grad:
            return o
        scores, count, pool = choice
        if target is None:
            target = probabilities(tensors, scale)
        loss = divergence(scores, by_key(target, scores, pool), count)
        self.losses[name] = loss.detach()
        found: Tensor = _WithLoss.apply(o, loss, self.coefficient)  # type: ignore[no-untyped-call]
        return found


def by_key(target: Tensor, scores: Tensor, pool: int) -> Tensor:
    """Probabilities [B, S, K] of the keys that scores are of, from those [T, K'] of the list's tokens."""
    keys = scores.shape[-1]
    tokens = target[..., : keys * pool].reshape(*scores.shape, pool)
    return tokens.sum(-1)


def divergence(scores: Tensor, target: Tensor, count: Tensor) -> Tensor:
    """Mean of KL(p || softmax(scores)) over the queries that have a target; p is the target over its sum."""
    used = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    target = torch.where(used, target.float(), 0.0)
    mass = target.sum(-1, keepdim=True)
    p = target / torch.where(mass > 0, mass, 1.0)
    inside = used | ~used.any(-1, keepdim=True)  # a row without keys must not divide by zero
    log_q = scores.float().masked_fill(~inside, float("-inf")).log_softmax(-1)
    log_p = torch.where(p > 0, p, 1.0).log()
    rows = torch.where(p > 0, p * (log_p - torch.where(p > 0, log_q, 0.0)), 0.0).sum(-1)
    return rows.sum() / (mass > 0).sum().clamp(min=1)


@torch.no_grad()
def probabilities(tensors: dict[str, Tensor], scale: float) -> Tensor:
    """The attention's probabilities [T, K] at the slots of a list shared by all heads, summed over heads, fp32."""
    q, k, index = tensors["q"], tensors["k"][:, 0], tensors["index"]
    if "q_rope" in tensors:
        q, k = torch.cat([q, tensors["q_rope"]], -1), torch.cat([k, tensors["k_rope"][:, 0]], -1)
    found = torch.zeros(index.shape, dtype=torch.float32, device=q.device)
    for first in range(0, q.shape[0], QUERIES):
        rows = slice(first, first + QUERIES)
        there = index[rows] >= 0
        s = torch.einsum("thd,tkd->thk", q[rows].float(), k[index[rows].clamp(min=0).long()].float()) * scale
        s = s.masked_fill(~there[:, None], float("-inf"))
        if "sink" in tensors:
            s = torch.cat([s, tensors["sink"].float()[None, :, None].expand(s.shape[0], -1, 1)], -1)
        p = s.softmax(-1).nan_to_num(0.0)[..., : index.shape[-1]]
        found[rows] = p.sum(1)
    return found


class _WithLoss(torch.autograd.Function):
    """Passes its first argument on; backward, the loss gets ``coefficient`` whatever comes in."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, loss: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient, ctx.like = coefficient, loss.detach()
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], torch.full_like(ctx.like, ctx.coefficient), None
