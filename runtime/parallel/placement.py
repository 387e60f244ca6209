"""Which part of a whole tensor this rank holds: what a streaming loader reads, what a merge writes."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_part(parameter: Tensor) -> tuple[slice, ...]:
    """The slice of the whole tensor that this rank's shard of ``parameter`` is, one slice a dimension.

    Experts are split over ``ep`` first, each rank's share over ``efsdp``; pieces follow ``torch.chunk``.

    Args:
        parameter: of a parallelized model; a plain tensor is whole.
    """
    slices = [slice(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for dim, axis in _splits(parameter):
            mesh = parameter.device_mesh
            slices[axis] = _chunks(slices[axis], mesh.size(dim))[mesh.get_local_rank(dim)]
    return tuple(slices)


def _splits(parameter: DTensor) -> list[tuple[int, int]]:
    """(mesh dimension, axis of the tensor) of every split, in the order in which they were made."""
    names = parameter.device_mesh.mesh_dim_names or ()
    # the ep split was made first, though its mesh dimension comes last
    order = sorted(range(parameter.device_mesh.ndim), key=lambda dim: names[dim] != "ep")
    placements = [(dim, parameter.placements[dim]) for dim in order]
    return [(dim, p.dim) for dim, p in placements if not isinstance(p, Replicate)]  # type: ignore[attr-defined]


def _chunks(whole: slice, parts: int) -> list[slice]:
    size = whole.stop - whole.start
    step = -(-size // parts)
    edges = [whole.start + min(size, step * number) for number in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the parameter."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor, gathered split by split: a collective call for a sharded one."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    mesh = parameter.device_mesh
    slices = [slice(0, size) for size in parameter.shape]
    stages = []
    for dim, axis in _splits(parameter):
        pieces = _chunks(slices[axis], mesh.size(dim))
        stages.append((dim, axis, [piece.stop - piece.start for piece in pieces]))
        slices[axis] = pieces[mesh.get_local_rank(dim)]
    whole = parameter._local_tensor.detach()
    for dim, axis, sizes in reversed(stages):
        padded = whole.new_zeros((*whole.shape[:axis], max(sizes), *whole.shape[axis + 1 :]))
        padded.narrow(axis, 0, whole.shape[axis]).copy_(whole)
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=mesh.get_group(dim))
        whole = torch.cat([g.narrow(axis, 0, size) for g, size in zip(gathered, sizes, strict=True)], axis)
    return whole
