"""Topology in, layouts and communication groups out. The runtime's rule: one dense and one expert mesh, same ranks."""

from __future__ import annotations

from onboarding.stages.scale.result import Group, Hardware
from onboarding.step_time.work import Work

MOST_SHOWN = 16


def possible(hardware: Hardware, work: Work) -> list[int]:
    """Sizes of expert groups that divide both the ranks and the experts; 1 for a dense model.

    Groups are consecutive ranks, so only sizes that tile a node, or are tiled by it, are taken: any other would split
    one node between two groups and send most of its traffic through its NICs for nothing.
    """
    if not work.experts:
        return [1]
    sizes = [n for n in range(1, hardware.devices + 1) if hardware.devices % n == 0 and work.experts % n == 0]
    return [n for n in sizes if n % hardware.per_node == 0 or hardware.per_node % n == 0]


def hierarchical(hardware: Hardware, ep: int) -> bool:
    """Two hops pay where a group spans nodes: a token then crosses once to each node, not once to each expert."""
    return ep > hardware.per_node and ep % hardware.per_node == 0


def groups(hardware: Hardware, ep: int) -> list[Group]:
    """Every communicator of the layout."""
    devices, inside = hardware.devices, hardware.per_node
    found = [
        _group("fsdp", "dense weights and their gradients", devices, 1, 1, inside),
    ]
    if ep > 1:
        found.append(_group("ep", "tokens to the experts and back", ep, devices // ep, 1, inside))
        found.append(_group("efsdp", "expert weights and their gradients", devices // ep, ep, ep, inside))
    if hierarchical(hardware, ep):
        nodes = ep // inside
        found.append(_group("ep_across", "first hop: once to each node", nodes, devices // nodes, inside, inside))
        found.append(_group("ep_inside", "second hop: inside the node", inside, devices // inside, 1, inside))
    return found


def expert_split(ep: int, work: Work) -> str:
    """Which experts a rank holds, in words."""
    if not work.experts:
        return "no routed experts"
    each = work.experts // ep
    if ep == 1:
        return f"all {work.experts} experts are sharded over all ranks and gathered block by block"
    return f"rank r holds experts {each} (r mod {ep}) to {each} (r mod {ep}) + {each - 1} of {work.experts}"


def _group(name: str, purpose: str, size: int, count: int, stride: int, per_node: int) -> Group:
    ranks = [stride * i for i in range(size)]
    mine = sum(rank // per_node == 0 for rank in ranks)
    return Group(
        name=name,
        purpose=purpose,
        size=size,
        count=count,
        stride=stride,
        first=ranks[:MOST_SHOWN],
        between_nodes=1 - mine / size,
    )
