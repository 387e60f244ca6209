"""Choosing experts under a bias, group limits and capacities.

Legend: T tokens, E experts, K experts a token, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

REROUTE_ROUNDS = 8
"""A slot that finds no room in this many tries is dropped (and counted)."""


def limit_groups(ranked: Tensor, groups: int, kept: int) -> Tensor:
    """Mask all experts outside each token's best groups with -inf; a group counts by its two best (DeepSeek-V3).

    Args:
        ranked: [T, E]; consecutive experts form a group.
        groups: G.
        kept: groups a token may use.
    """
    tokens, experts = ranked.shape
    by_group = ranked.view(tokens, groups, experts // groups)
    worth = by_group.topk(min(2, experts // groups), -1).values.sum(-1)
    best = worth.topk(kept, -1).indices
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~allowed.unsqueeze(-1), -math.inf).view(tokens, experts)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A choice that respects capacities."""

    chosen: Tensor
    """int64 [T, K]; a dropped slot keeps its first choice."""
    dropped: Tensor
    """bool [T, K]."""
    rerouted: Tensor
    """int64 scalar, slots that got another expert than their first choice."""


def capacity(tokens: int, slots: int, experts: int, factor: float) -> int:
    """ceil(factor T K / E)."""
    return math.ceil(factor * tokens * slots / experts)


def fit(chosen: Tensor, ranked: Tensor, room: int, reroute: bool) -> Fitted:
    """Let every expert keep its first ``room`` slots, in token order.

    Args:
        chosen: int64 [T, K], best first or not.
        ranked: [T, E], by which rerouted slots choose again.
        room: slots an expert takes.
        reroute: whether slots past the room try their next best expert; else they are dropped.
    """
    tokens, slots = chosen.shape
    experts = ranked.shape[1]
    taken = _rank_in_expert(chosen, experts) < room
    load = _load(chosen[taken], experts)
    first = chosen
    for _ in range(REROUTE_ROUNDS if reroute else 0):
        # a token never gets one expert twice, a full expert takes nobody
        barred = torch.zeros(tokens, experts, dtype=torch.bool, device=chosen.device)
        barred.scatter_(1, chosen.where(taken, chosen[:, :1]), True)
        barred.scatter_(1, first, True)
        candidates = ranked.masked_fill(barred | (load >= room), -math.inf)
        next_best = candidates.topk(min(slots, experts), 1)
        waiting = ~taken
        turn = (waiting.cumsum(1) - 1).clamp(min=0)
        turn = turn.clamp(max=next_best.indices.shape[1] - 1)
        offered = next_best.indices.gather(1, turn)
        asking = waiting & next_best.values.gather(1, turn).isfinite()
        asked = torch.where(asking, offered, experts)
        accepted = asking & (_rank_in_expert(asked, experts + 1) + torch.cat([load, load.new_zeros(1)])[asked] < room)
        chosen = chosen.where(~accepted, offered)
        taken = taken | accepted
        load = load + _load(offered[accepted], experts)
    return Fitted(chosen=chosen, dropped=~taken, rerouted=(taken & (chosen != first)).sum())


def _rank_in_expert(chosen: Tensor, experts: int) -> Tensor:
    """int64 [T, K]: how many earlier slots have the same expert."""
    flat = chosen.reshape(-1)
    by_expert, order = flat.sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(experts, device=flat.device))
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel(), device=flat.device) - starts[by_expert]
    return rank.view(chosen.shape)


def _load(chosen: Tensor, experts: int) -> Tensor:
    return torch.bincount(chosen.reshape(-1), minlength=experts)
