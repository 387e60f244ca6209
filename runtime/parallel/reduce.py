"""Gradient sums in rank order, optionally in fewer bytes with the rounding error fed back.

A reduce-scatter as an all-to-all of pieces and a local sum: the order of adding is that of the ranks, whatever the
network does, and what travels can be bf16 or fp8 while the sum stays fp32. The error that rounding leaves is kept and
added to the next step's gradient (error feedback, Seide et al. 2014), so that it delays but never loses an update.

Legend: W ranks, n elements of one rank's piece, B elements that share a scale.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runtime.parallel.config import Compression, ParallelConfig

BLOCK = 128
"""B of fp8: one fp32 scale for 128 values, 3 % more bytes."""
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0


class OrderedReduceScatter:
    """FSDP2's ``ReduceScatter`` seam; one object for each unit, since it remembers the unit's error."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.error: Tensor | None = None
        """[W n] in bf16: as large as the unit's trained weights, unsharded. Meant for adapters."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients of a unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum the ranks' ``input_tensor`` [W n] and leave this rank's piece in ``output_tensor`` [n].

        Raises:
            ValueError: another reduction than a sum is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed here, not reduced by {op}")
        ranks = dist.get_world_size(group)
        pieces = input_tensor.view(ranks, -1)
        if self.compression == "none":
            received = torch.empty_like(pieces)
            dist.all_to_all_single(received, pieces.contiguous(), group=group)
            output_tensor.copy_(_sum(received))
            return
        if self.error is not None:
            pieces = pieces + self.error.view_as(pieces)
        packed = pack(pieces, self.compression)
        self.error = (pieces - unpack(packed, self.compression, pieces.shape[1])).to(torch.bfloat16).view(-1)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=group)
        output_tensor.copy_(_sum(unpack(received, self.compression, pieces.shape[1])))


def _sum(pieces: Tensor) -> Tensor:
    """[W, n] -> [n], one rank after another."""
    total = pieces[0].to(torch.promote_types(pieces.dtype, torch.float32))
    for piece in pieces[1:]:
        total = total + piece
    return total


def pack(pieces: Tensor, compression: Compression) -> Tensor:
    """[W, n] -> bytes [W, m]: values, and behind them the scales of fp8."""
    if compression == "bf16":
        return pieces.to(torch.bfloat16).contiguous().view(torch.uint8)
    ranks, n = pieces.shape
    blocks = torch.nn.functional.pad(pieces.float(), (0, -n % BLOCK)).view(ranks, -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / FP8_LARGEST
    values = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
    as_bytes = [values.view(ranks, -1).view(torch.uint8), scales.view(ranks, -1).view(torch.uint8)]
    return torch.cat(as_bytes, 1)


def unpack(packed: Tensor, compression: Compression, n: int) -> Tensor:
    """The fp32 values [W, n] that ``pack`` kept. A NaN or infinity in a block of fp8 comes back as NaN."""
    if compression == "bf16":
        return packed.view(torch.bfloat16).float()
    ranks = packed.shape[0]
    padded = n + -n % BLOCK
    values = packed[:, :padded].view(FP8).float().view(ranks, -1, BLOCK)
    scales = packed[:, padded:].contiguous().view(torch.float32).unsqueeze(-1)
    return (values * scales).view(ranks, -1)[:, :n]


def order_reductions(model: nn.Module, config: ParallelConfig) -> None:
    """Give every FSDP unit an ``OrderedReduceScatter`` where the layout asks for one."""
    if not config.deterministic and config.compression == "none":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OrderedReduceScatter(config.compression))  # type: ignore[arg-type]
