"""Spare copies of busy experts, chosen anew after every step from the step's load.

A rank's spare slots hold copies of other ranks' experts for one pass: owners send the weights before it, the copies'
gradients return and are added to the owner's. A copy is no parameter: it has no optimizer state that could lag behind,
and the owner's update is the only one. An expert's tokens take turns between its copies.

Legend: E experts, P ranks, w = E / P experts a rank owns, X spare slots a rank; slot p is place p % (w + X) of rank
p // (w + X), and the first w places of a rank are its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which experts have copies where; the same on every rank."""

    experts: int
    ranks: int
    spare: int
    copies: tuple[tuple[int, ...], ...]
    """Expert in each used spare slot, by rank: at most ``spare`` a rank."""

    @property
    def own(self) -> int:
        return self.experts // self.ranks

    @property
    def width(self) -> int:
        """Slots a rank has."""
        return self.own + self.spare

    def table(self) -> tuple[list[list[int]], list[int]]:
        """Slots of each expert, the owner's first (padded with it), and how many there are."""
        slots = [[e // self.own * self.width + e % self.own] for e in range(self.experts)]
        for rank, held in enumerate(self.copies):
            for place, expert in enumerate(held):
                slots[expert].append(rank * self.width + self.own + place)
        most = max(len(s) for s in slots)
        return [s + s[:1] * (most - len(s)) for s in slots], [len(s) for s in slots]


def place(load: list[float], ranks: int, spare: int) -> Placement:
    """Give the expert with the most load a copy to another copy, on the least loaded rank that has room, until full.

    Args:
        load: slots of each expert in the last step, over all ranks.
        ranks: expert ranks.
        spare: slots a rank.
    """
    own = len(load) // ranks
    holders = [{e // own} for e in range(len(load))]
    held: list[list[int]] = [[] for _ in range(ranks)]

    def rank_load(rank: int) -> float:
        return sum(load[e] / len(holders[e]) for e in range(len(load)) if rank in holders[e])

    for _ in range(ranks * spare):
        expert = max(range(len(load)), key=lambda e: (load[e] / len(holders[e]), -e))
        free = [r for r in range(ranks) if len(held[r]) < spare and r not in holders[expert]]
        if not free or load[expert] == 0:
            break
        target = min(free, key=lambda r: (rank_load(r), r))
        held[target].append(expert)
        holders[expert].add(target)
    return Placement(experts=len(load), ranks=ranks, spare=spare, copies=tuple(tuple(h) for h in held))


class Replicas:
    """The copies of one layer on one rank."""

    def __init__(self, group: dist.ProcessGroup, experts: int, spare: int) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.placement = place([0.0] * experts, dist.get_world_size(group), spare)

    def follow(self, load: Tensor) -> None:
        """Choose copies for the next step from this step's load [E]."""
        self.placement = place(load.tolist(), self.placement.ranks, self.placement.spare)

    def slots(self, index: Tensor) -> Tensor:
        """Slot of each expert of ``index``, int64 [T, K], -1 kept; tokens take an expert's copies in turn."""
        table, counts = (torch.tensor(values, device=index.device) for values in self.placement.table())
        expert = index.clamp(min=0)
        turn = (torch.arange(index.shape[0], device=index.device).unsqueeze(1) + self.rank) % counts[expert]
        return table[expert, turn].where(index >= 0, -1)

    def extend(self, weight: Tensor) -> Tensor:
        """This rank's experts and the copies that it holds, [w, ...] -> [w + X, ...]; unused slots are zero."""
        result: Tensor = _Extend.apply(weight, self.placement, self.group)  # type: ignore[no-untyped-call]
        return result


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, placement: Placement, group: dist.ProcessGroup) -> Tensor:
        ctx.placement, ctx.group = placement, group
        rank = dist.get_rank(group)
        sent, send, recv = _exchange_plan(placement, rank)
        received = weight.new_empty((sum(recv), *weight.shape[1:]))
        dist.all_to_all_single(received, weight[sent].contiguous(), recv, send, group=group)
        spare = weight.new_zeros((placement.spare, *weight.shape[1:]))
        spare[_places(placement, rank)] = received
        return torch.cat([weight, spare])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        placement: Placement = ctx.placement
        rank = dist.get_rank(ctx.group)
        sent, send, recv = _exchange_plan(placement, rank)
        gradient = grads[0]
        own, spare = gradient[: placement.own].clone(), gradient[placement.own :]
        returned = gradient.new_empty((sum(send), *gradient.shape[1:]))
        dist.all_to_all_single(returned, spare[_places(placement, rank)].contiguous(), send, recv, group=ctx.group)
        for row, expert in enumerate(sent):  # in rank order
            own[expert] += returned[row]
        return own, None, None


def _exchange_plan(placement: Placement, rank: int) -> tuple[list[int], list[int], list[int]]:
    """(own experts to send, by destination; how many to each rank; how many from each rank)."""
    mine = range(rank * placement.own, (rank + 1) * placement.own)
    by_target = [[e - mine.start for e in held if e in mine] for held in placement.copies]
    send = [len(experts) for experts in by_target]
    owners = [e // placement.own for e in placement.copies[rank]]
    return [e for experts in by_target for e in experts], send, [owners.count(r) for r in range(placement.ranks)]


def _places(placement: Placement, rank: int) -> list[int]:
    """Spare places of this rank in the order in which their weights arrive: by owner, then by place."""
    held = placement.copies[rank]
    return sorted(range(len(held)), key=lambda place: (held[place] // placement.own, place))
