"""Who sends how many rows to whom: counted from the router's choice, or taken from a load for dry runs.

Legend: R rows, K slots a row, G ranks of a hop, S rows sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HopPlan:
    """One rank's side of one all-to-all; the way back is its transpose."""

    source: Tensor
    """int64 [S], the row of each copy that is sent, by destination, then by row."""
    places: Tensor
    """int64 [R, K], where a row's copies are in the send order; -1 for none."""
    send: list[int]
    """[G] rows to each rank."""
    recv: list[int]
    """[G] rows from each rank."""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One all-to-all of the way to an expert."""

    group: dist.ProcessGroup
    reach: tuple[frozenset[int], ...]
    """Experts that lie behind each rank of the group."""

    @property
    def size(self) -> int:
        return len(self.reach)

    @property
    def here(self) -> int:
        return dist.get_rank(self.group)


class RoutingSource(Protocol):
    """Where the sizes of an all-to-all come from."""

    def plan(self, destination: Tensor, hop: Hop, tokens: int) -> HopPlan:
        """Plan one hop.

        Args:
            destination: int64 [R, K], the rank of ``hop`` that each slot goes to; -1 for none.
            hop: its ranks and what can be reached through each.
            tokens: of the routers' tokens, how many this rank's rows stand for.
        """
        ...

    def counts(self, index: Tensor, experts: range, tokens: int) -> list[int]:
        """Slots of each local expert.

        Args:
            index: int64 [R, K], local expert of each slot; -1 for none.
            experts: global numbers of the local experts.
            tokens: of the routers' tokens, how many were routed over all experts.
        """
        ...


class CountedRouting:
    """The real thing: counts are exchanged, then read on the host, one synchronisation a hop."""

    def plan(self, destination: Tensor, hop: Hop, tokens: int) -> HopPlan:
        rows = destination.shape[0]
        hit = torch.zeros(rows, hop.size + 1, dtype=torch.bool, device=destination.device)
        hit.scatter_(1, destination.where(destination >= 0, hop.size), True)
        sent = hit[:, : hop.size].t().contiguous()  # [G, R]
        counts = torch.stack([sent.sum(1), torch.zeros(hop.size, dtype=torch.int64, device=sent.device)])
        dist.all_to_all_single(counts[1], counts[0].clone(), group=hop.group)
        send, recv = counts.tolist()
        order = (sent.reshape(-1).cumsum(0) - 1).view(hop.size, rows)
        return HopPlan(source=sent.nonzero()[:, 1], places=_places(destination, order.t()), send=send, recv=recv)

    def counts(self, index: Tensor, experts: range, tokens: int) -> list[int]:
        flat = index.reshape(-1) + 1
        counted: list[int] = torch.bincount(flat, minlength=len(experts) + 1)[1:].tolist()
        return counted


class LoadRouting:
    """Sizes from a load, the same on every rank, for dry runs on fake tensors: nothing is read from a tensor."""

    def __init__(self, num_experts: int, load: Sequence[float] | None = None) -> None:
        """
        Args:
            num_experts: routed experts of a layer.
            load: slots that each expert gets, in any unit; None for an even load.

        Raises:
            ValueError: the load is of another number of experts, negative or zero throughout.
        """
        values = [1.0] * num_experts if load is None else [float(share) for share in load]
        if len(values) != num_experts or min(values) < 0 or sum(values) <= 0:
            raise ValueError(f"a load needs {num_experts} numbers, none negative and not all zero")
        self.load = [share / sum(values) for share in values]

    def plan(self, destination: Tensor, hop: Hop, tokens: int) -> HopPlan:
        slots = destination.shape[1]
        # a token has at least one of its slots behind the rank, slots taken as independent
        send = [round(tokens * (1.0 - (1.0 - self._share(experts)) ** slots)) for experts in hop.reach]
        return HopPlan(
            source=destination.new_zeros(sum(send)),
            places=torch.zeros_like(destination),
            send=send,
            recv=[send[hop.here]] * hop.size,
        )

    def counts(self, index: Tensor, experts: range, tokens: int) -> list[int]:
        slots = tokens * index.shape[1]
        return [round(slots * self._share(frozenset([e]))) for e in experts]

    def _share(self, experts: frozenset[int]) -> float:
        return sum(self.load[e] for e in experts)


def _places(destination: Tensor, order: Tensor) -> Tensor:
    """Copies of each row, once for each distinct destination.

    Args:
        destination: int64 [R, K].
        order: int64 [R, G], where the row's copy for each rank lies.
    """
    if not destination.numel():
        return destination.clone()
    ascending = destination.sort(1).values
    first = torch.ones_like(ascending, dtype=torch.bool)
    first[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    places = order.gather(1, ascending.clamp(min=0))
    return places.where(first & (ascending >= 0), -1)
