"""One clip path for every kind of gradient: sharded dense, expert-parallel, adapter, replicated, offloaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from runtime.parallel.meshes import Meshes


def clip_grad_norm(parameters: Iterable[nn.Parameter], meshes: Meshes, max_norm: float) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most ``max_norm``; return the norm before.

    Every local sum of squares is divided by the number of ranks that hold the same piece, then all are summed over
    the world by one all-reduce: the same number on every rank, whatever the mix of meshes.
    A norm that is not finite leaves the gradients as they are; the caller decides what to do.

    Args:
        parameters: those with gradients count.
        meshes: of the model.
        max_norm: positive; ``inf`` only measures.

    Returns:
        fp64 scalar on the mesh's device.

    Raises:
        ValueError: a gradient is a pending sum; names its placements.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(gradients, meshes)
    if max_norm == float("inf"):
        return norm
    scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    locals_ = [_local(g) for g in gradients]
    for same in _by_kind(locals_):
        torch._foreach_mul_(same, scale.to(same[0].device, _wide(same[0])))
    return norm


def global_norm(gradients: list[Tensor], meshes: Meshes) -> Tensor:
    """The 2-norm of all gradients over all ranks, fp64."""
    device = torch.device(meshes.device_type)
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(copies(gradient, meshes.world_size), []).append(_local(gradient))
    for count, pieces in by_copies.items():
        for same in _by_kind([p for p in pieces if p.numel()]):
            norms = torch._foreach_norm(same, 2, dtype=_wide(same[0]))
            total += torch.stack(norms).double().square().sum().to(device) / count
    if meshes.dense is not None:
        dist.all_reduce(total)
    return total.sqrt()


def copies(tensor: Tensor, world_size: int) -> int:
    """How many ranks hold the same piece of ``tensor``.

    Raises:
        ValueError: it is a pending sum.
    """
    if not isinstance(tensor, DTensor):
        return world_size
    sharded = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise ValueError(f"a gradient with placements {tensor.placements} was never reduced")
        if not isinstance(placement, Replicate):
            sharded *= size
    return world_size // sharded


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
