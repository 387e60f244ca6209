"""The way of rows to their experts and back: one hop over all expert ranks, or two hops by node.

Spreading rows and summing what comes back are adjoint, so forward and backward use the same two functions.
A token goes once to each rank (two hops: once to each node) that holds one of its experts, never once an expert.
The seam for another backend (a library in the manner of DeepEP) is this class: ``plan``, ``spread``, ``collect``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from runtime.experts.buffers import RingPool
from runtime.experts.routing import Hop, HopPlan, RoutingSource
from runtime.experts.rows import sum_rows
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes


@dataclass(frozen=True, kw_only=True)
class Route:
    """Everything about one batch of tokens that a second pass needs to repeat the first exactly."""

    hops: list[HopPlan]
    tokens: int
    index: Tensor
    """int64 [R, K], local expert of each slot of each received row; -1 for none."""
    counts: list[int]
    """Slots of each local expert."""


@dataclass
class Traffic:
    """Bytes that left this rank, by hop, since the start; a row to oneself is not counted."""

    bytes: list[int] = field(default_factory=lambda: [0, 0])
    calls: int = 0


Pending = Callable[[], Tensor]
"""Call it to wait for a collective and get its result."""


class Transport:
    """Moves rows between the ranks that share one copy of the experts."""

    def __init__(
        self, meshes: Meshes, config: ParallelConfig, num_experts: int, source: RoutingSource, pool: RingPool
    ) -> None:
        """
        Args:
            meshes: of the job; its ep group has more than one rank.
            config: chooses one or two hops.
            num_experts: routed experts of a layer.
            source: where sizes come from.
            pool: communication buffers.
        """
        assert meshes.ep is not None
        self.source = source
        self.pool = pool
        self.traffic = Traffic()
        self.width = num_experts // meshes.ep_size
        self.experts = range(meshes.ep_rank * self.width, (meshes.ep_rank + 1) * self.width)
        self._strides = _strides(config, meshes.ep_size)
        self.hops: list[Hop] = []
        behind = list(range(meshes.ep_size))
        for mesh, (stride, size) in zip(_meshes(meshes, config), self._strides, strict=True):
            reach = [[rank for rank in behind if rank // stride % size == g] for g in range(size)]
            experts = tuple(frozenset(e for r in ranks for e in self._of(r)) for ranks in reach)
            self.hops.append(Hop(group=mesh.get_group(), reach=experts))
            behind = reach[meshes.ep_rank // stride % size]

    def _of(self, rank: int) -> range:
        return range(rank * self.width, (rank + 1) * self.width)

    def route(self, index: Tensor, weights: Tensor) -> tuple[Route, Tensor]:
        """Plan the way of every token and send the routing ahead.

        Args:
            index: int64 [T, K], global expert of each slot; -1 for none.
            weights: [T, K], its weight.

        Returns:
            the route, and the weights [R, K] of the received rows' slots (zero where the slot is not for here).
        """
        plans: list[HopPlan] = []
        tokens = index.shape[0]
        for hop, (stride, size) in zip(self.hops, self._strides, strict=True):
            destination = torch.where(index >= 0, index // self.width // stride % size, -1)
            plan = self.source.plan(destination, hop, tokens)
            plans.append(plan)
            tokens *= hop.size
            index = self._send(index, plan, hop)()
            weights = self._send(weights, plan, hop)()
            mine = (index >= 0) & (index // self.width // stride % size == hop.here)
            index, weights = index.where(mine, -1), weights.where(mine, 0)
        index = torch.where(index >= 0, index % self.width, -1)
        counts = self.source.counts(index, self.experts, tokens)
        return Route(hops=plans, tokens=plans[0].places.shape[0], index=index, counts=counts), weights

    def spread(self, x: Tensor, route: Route) -> Pending:
        """Send rows [T, D] to where they are needed; the last hop is still on its way when this returns.

        Returns:
            a function that waits and gives the received rows [R, D].
        """
        self.traffic.calls += 1
        pending: Pending = lambda: x  # noqa: E731
        for number, (hop, plan) in enumerate(zip(self.hops, route.hops, strict=True)):
            pending = self._send(pending(), plan, hop, number)
        return pending

    def collect(self, y: Tensor, route: Route) -> Pending:
        """Send results [R, D] back and sum them by token; the first hop is on its way when this returns.

        Returns:
            a function that waits and gives the sums [T, D].
        """
        self.traffic.calls += 1
        steps = list(zip(self.hops, route.hops, range(len(self.hops)), strict=True))[::-1]
        hop, plan, number = steps[0]
        first = self._send_back(y, plan, hop, number)

        def finish() -> Tensor:
            rows = sum_rows(first(), plan.places)
            for next_hop, next_plan, next_number in steps[1:]:
                back = self._send_back(rows, next_plan, next_hop, next_number)
                rows = sum_rows(back(), next_plan.places)
            return rows

        return finish

    def _send(self, x: Tensor, plan: HopPlan, hop: Hop, number: int | None = None) -> Pending:
        lease = self.pool.take((plan.source.shape[0], *x.shape[1:]), x)
        torch.index_select(x, 0, plan.source, out=lease.tensor)
        self._count(lease.tensor, plan.send, hop, number)
        received = x.new_empty((sum(plan.recv), *x.shape[1:]))
        return _exchange(received, lease.tensor, plan.recv, plan.send, hop.group, lease.give_back)

    def _send_back(self, y: Tensor, plan: HopPlan, hop: Hop, number: int) -> Pending:
        y = y.contiguous()
        self._count(y, plan.recv, hop, number)
        # not from the pool: the sum reads it after the wait, and nothing says when that has run
        received = y.new_empty((sum(plan.send), *y.shape[1:]))
        return _exchange(received, y, plan.send, plan.recv, hop.group, lambda: None)

    def _count(self, rows: Tensor, splits: list[int], hop: Hop, number: int | None) -> None:
        if number is not None and rows.shape[0]:
            row = rows[0].numel() * rows.element_size()
            self.traffic.bytes[number] += row * (sum(splits) - splits[hop.here])


def _exchange(
    received: Tensor,
    sent: Tensor,
    recv: list[int],
    send: list[int],
    group: dist.ProcessGroup,
    after: Callable[[], None],
) -> Pending:
    work = dist.all_to_all_single(received, sent, recv, send, group=group, async_op=True)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        after()
        return received

    return wait


def _meshes(meshes: Meshes, config: ParallelConfig) -> list[DeviceMesh]:
    by_order = {
        "off": [meshes.ep],
        "across_first": [meshes.across, meshes.inside],
        "inside_first": [meshes.inside, meshes.across],
    }
    return [mesh for mesh in by_order[config.hierarchical] if mesh is not None]


def _strides(config: ParallelConfig, ep: int) -> list[tuple[int, int]]:
    """(stride, size) of each hop: the hop's rank of expert rank r is r // stride % size."""
    inside = (1, config.ranks_per_node)
    across = (config.ranks_per_node, ep // max(config.ranks_per_node, 1))
    return {"off": [(1, ep)], "across_first": [across, inside], "inside_first": [inside, across]}[config.hierarchical]
