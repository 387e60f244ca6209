"""Which part of a whole tensor this rank holds: what a streaming loader reads, what a merge writes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_part(parameter: Tensor) -> tuple[slice, ...]:
    """The slice of the whole tensor that this rank's shard of ``parameter`` is, one slice a dimension.

    Experts are split over ``ep`` first, each rank's share over ``efsdp``; pieces follow ``torch.chunk``.

    Args:
        parameter: of a parallelized model; a plain tensor is whole.
    """
    slices = [slice(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(slices)
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    # the ep split was made first, though its mesh dimension comes last
    for dim in sorted(range(mesh.ndim), key=lambda d: names[d] != "ep"):
        placement = parameter.placements[dim]
        if isinstance(placement, Replicate):
            continue
        axis: int = placement.dim  # type: ignore[attr-defined]
        slices[axis] = _chunk(slices[axis], mesh.size(dim), mesh.get_local_rank(dim))
    return tuple(slices)


def _chunk(whole: slice, parts: int, number: int) -> slice:
    size = whole.stop - whole.start
    step = -(-size // parts)
    return slice(whole.start + min(size, step * number), whole.start + min(size, step * (number + 1)))


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the parameter."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor, gathered: a collective call for a sharded one."""
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
