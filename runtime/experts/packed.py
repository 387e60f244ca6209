"""Frozen expert weights kept as they are stored, in 4 or 8 bits, and unpacked for the pass that needs them.

``mxfp4`` is the OCP microscaling format, two E2M1 values a byte and one power-of-two scale (E8M0) for 32 of them;
``fp8`` is E4M3 with one fp32 scale for a tile of 128 x 128, as DeepSeek-V3 stores its weights. Everything is kept in
uint8 parameters [E, ...]: expert parallelism and FSDP split and gather the bytes, no mixed precision casts them.

Legend: E experts, O output width, I input width (the axis of a dot product, last in memory in any model's layout).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.experts.sites import find_experts

Format = Literal["mxfp4", "fp8"]
GROUP, TILE = 32, 128
BLOCKS, SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# a tie goes to the value with an even mantissa: above these, or at them, is the next value
_ABOVE, _FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def pack_experts(model: nn.Module, kind: Format) -> None:
    """Replace every frozen expert weight W [E, ., .] by W_blocks and W_scales, in place, before ``parallelize``.

    Weights on the meta device get empty bytes: a loader fills them with a checkpoint's own blocks.

    Raises:
        ValueError: a weight trains, or its input width is no multiple of 32 (mxfp4); says what to do.
    """
    for site in find_experts(model):
        transposed = bool(getattr(site.experts, "is_transposed", False))
        for name, weight in list(site.experts.named_parameters(recurse=False)):
            if weight.ndim != 3:
                continue
            if weight.requires_grad:
                raise ValueError(f"{site.name}.{name} trains, and packed weights cannot: apply_lora first")
            blocks, scales = pack(weight.detach().mT if transposed else weight.detach(), kind)
            del site.experts._parameters[name]
            site.experts.register_parameter(name + BLOCKS, nn.Parameter(blocks, requires_grad=False))
            site.experts.register_parameter(name + SCALES, nn.Parameter(scales, requires_grad=False))
        site.experts.__dict__["_packed"] = kind


def is_packed(experts: nn.Module) -> bool:
    """Whether ``pack_experts`` has changed this module."""
    return "_packed" in experts.__dict__


def unpacked(experts: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """``tensors`` with each pair of blocks and scales replaced by the weight in ``dtype`` and the model's layout."""
    kind: Format | None = experts.__dict__.get("_packed")
    if kind is None:
        return tensors
    result = {n: t for n, t in tensors.items() if not n.endswith((BLOCKS, SCALES))}
    for name in [n for n in tensors if n.endswith(BLOCKS)]:
        plain = name.removesuffix(BLOCKS)
        weight = unpack(tensors[name], tensors[plain + SCALES], kind, dtype)
        result[plain] = weight.mT if getattr(experts, "is_transposed", False) else weight
    return result


def pack(weight: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Round weight [E, O, I] to nearest.

    Returns:
        uint8 blocks [E, O, I / 2] and scales [E, O, I / 32] for mxfp4; blocks [E, O, I] and the bytes of fp32 scales
        [E, ceil(O / 128), 4 ceil(I / 128)] for fp8.
    """
    experts, rows, columns = weight.shape
    if kind == "fp8":
        tiles = _tiles(weight.float())
        scale = tiles.abs().amax((2, 4)) / torch.finfo(torch.float8_e4m3fn).max
        scale = scale.where(scale > 0, 1.0)
        values = (tiles / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
        flat = values.reshape(experts, values.shape[1] * TILE, -1)[:, :rows, :columns].contiguous()
        return flat.view(torch.uint8), scale.contiguous().view(torch.uint8)
    if columns % GROUP:
        raise ValueError(f"mxfp4 needs an input width that is a multiple of {GROUP}, not {columns}; use fp8")
    groups = weight.float().view(experts, rows, -1, GROUP)
    exponent = torch.frexp(groups.abs().amax(-1))[1] - 1 - 2  # floor(log2 max) - 2: E2M1 reaches 6 = 1.5 * 2^2
    exponent = exponent.clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for edge in _ABOVE:
        code += size > edge
    for edge in _FROM:
        code += size >= edge
    code += 8 * torch.signbit(scaled).to(torch.uint8)
    pairs = code.view(experts, rows, -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8)


def unpack(blocks: Tensor, scales: Tensor, kind: Format, dtype: torch.dtype) -> Tensor:
    """The weight [E, O, I] that ``pack`` kept; exact in bf16 and wider for mxfp4."""
    experts, rows, columns = blocks.shape
    if kind == "fp8":
        scale = scales.contiguous().view(torch.float32)
        full = scale.repeat_interleave(TILE, 1)[:, :rows].repeat_interleave(TILE, 2)[:, :, :columns]
        return (blocks.view(torch.float8_e4m3fn).float() * full).to(dtype)
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=dtype, device=blocks.device)
    values = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1)
    groups = values.view(experts, rows, -1, GROUP)
    factor = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127).to(dtype)
    return (groups * factor.unsqueeze(-1)).view(experts, rows, columns * 2)


def _tiles(weight: Tensor) -> Tensor:
    """[E, O, I] -> [E, O / 128, 128, I / 128, 128], padded with zeros."""
    experts, rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % TILE, 0, -rows % TILE))
    return padded.view(experts, padded.shape[1] // TILE, TILE, -1, TILE)
