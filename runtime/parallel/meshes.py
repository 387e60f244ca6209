"""The two meshes over the same ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime.parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Dense and expert mesh of one job; both None for one process without a process group."""

    dense: DeviceMesh | None
    """(dp_replicate, fsdp); every weight but the experts'."""
    expert: DeviceMesh | None
    """(dp_replicate, efsdp, ep); consecutive ranks share an ep group."""
    across: DeviceMesh | None = None
    """(ep_across): the ranks of an ep group with this rank's place in their nodes; for two hops only."""
    inside: DeviceMesh | None = None
    """(ep_inside): the ranks of an ep group on this rank's node; for two hops only."""
    world_size: int
    rank: int
    device_type: str

    @classmethod
    def alone(cls, device_type: str) -> Meshes:
        """One process by itself, with or without a process group around it."""
        return cls(dense=None, expert=None, world_size=1, rank=0, device_type=device_type)

    @property
    def data(self) -> DeviceMesh | None:
        """Where dense weights are sharded: (fsdp), or (dp_replicate, fsdp) with replicas."""
        if self.dense is None:
            return None
        return self.dense if self.dense.size(0) > 1 else self.dense["fsdp"]

    @property
    def expert_data(self) -> DeviceMesh | None:
        """Where a rank's experts are sharded: (efsdp), or (dp_replicate, efsdp) with replicas."""
        if self.expert is None:
            return None
        return self.expert["dp_replicate", "efsdp"] if self.expert.size(0) > 1 else self.expert["efsdp"]

    @property
    def ep(self) -> DeviceMesh | None:
        """The ranks that share one copy of the experts."""
        return None if self.expert is None else self.expert["ep"]

    @property
    def ep_size(self) -> int:
        return 1 if self.expert is None else self.expert.size(2)

    @property
    def ep_rank(self) -> int:
        return 0 if self.expert is None else self.expert.get_local_rank("ep")


def build_meshes(config: ParallelConfig, world_size: int, device_type: str) -> Meshes:
    """Build both meshes and start every group's communicator.

    Args:
        config: the layout.
        world_size: ranks of the job, as in the process group.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        ValueError: the layout does not fit the ranks, or several ranks have no process group.
    """
    # the experts are not known here: parallelize checks them
    config.check(world_size, num_experts=config.ep)
    if not dist.is_initialized():
        if world_size > 1:
            raise ValueError(f"{world_size} ranks need a process group: start them with torchrun")
        return Meshes.alone(device_type)
    if dist.get_world_size() != world_size:
        raise ValueError(f"the process group has {dist.get_world_size()} ranks, not {world_size}")
    shard = world_size // config.dp_replicate
    dense = init_device_mesh(device_type, (config.dp_replicate, shard), mesh_dim_names=("dp_replicate", "fsdp"))
    expert = init_device_mesh(
        device_type,
        (config.dp_replicate, config.efsdp(world_size), config.ep),
        mesh_dim_names=("dp_replicate", "efsdp", "ep"),
    )
    across = inside = None
    if config.hierarchical != "off":
        inside_size = config.ranks_per_node
        hops = init_device_mesh(
            device_type,
            (world_size // config.ep, config.ep // inside_size, inside_size),
            mesh_dim_names=("copies", "ep_across", "ep_inside"),
        )
        across, inside = hops["ep_across"], hops["ep_inside"]
    meshes = Meshes(
        dense=dense,
        expert=expert,
        across=across,
        inside=inside,
        world_size=world_size,
        rank=dist.get_rank(),
        device_type=device_type,
    )
    _start_communicators(meshes)
    return meshes


def _start_communicators(meshes: Meshes) -> None:
    """NCCL builds a communicator at a group's first use; near full memory that stalls outside every timeout."""
    if meshes.device_type != "cuda" or dist.get_backend() == "fake":
        return
    import torch

    one = torch.ones(1, device="cuda")
    for mesh in (meshes.dense, meshes.expert, meshes.across, meshes.inside):
        if mesh is None:
            continue
        for name in mesh.mesh_dim_names or ():
            dist.all_reduce(one, group=mesh.get_group(name))
    torch.cuda.synchronize()
