"""Stand-in for DeepGEMM: its products with scales a block, dequantised and multiplied in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
Scaled = tuple[Tensor, Tensor]
"""Values in fp8 and their scales: one a row and 128 columns, or one a 128 x 128 block."""


def dequantised(pair: Scaled) -> Tensor:
    """Values times scales, fp32; ``[..., M, K]`` with scales ``[..., M or ceil(M / 128), ceil(K / 128)]``."""
    values, scales = pair
    rows, columns = values.shape[-2:]
    wide = scales.float().repeat_interleave(BLOCK, -1)[..., :columns]
    if wide.shape[-2] != rows:
        wide = wide.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return values.float() * wide


def fp8_gemm_nt(a: Scaled, b: Scaled, d: Tensor, c: Tensor | None = None, **_: object) -> None:
    """d = a b^T (+ c), a ``[M, K]``, b ``[N, K]``."""
    product = dequantised(a) @ dequantised(b).mT
    d.copy_(product if c is None else product + c)


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None, **_: object) -> None:
    """The same without scales."""
    product = a.float() @ b.float().mT
    d.copy_(product if c is None else product + c)


def m_grouped_fp8_gemm_nt_contiguous(a: Scaled, b: Scaled, d: Tensor, m_indices: Tensor, **_: object) -> None:
    """Row m of a ``[M, K]`` times matrix ``m_indices[m]`` of b ``[G, N, K]``; rows of index -1 are padding."""
    _grouped(dequantised(a), dequantised(b), d, m_indices)


def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor, **_: object) -> None:
    """The same without scales."""
    _grouped(a.float(), b.float(), d, m_indices)


def _grouped(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
    for group in range(b.shape[0]):
        product = a @ b[group].mT
        d.copy_(torch.where((m_indices == group)[:, None], product.to(d.dtype), d))


def per_token_cast_to_fp8(x: Tensor, *_: object) -> Scaled:
    """x ``[M, K]`` as fp8 with one scale a row and 128 columns."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK)).float()
    scales = padded.abs().amax(-1).clamp_min(1e-4) / 448.0
    return (padded / scales[..., None]).flatten(-2)[:, :columns].to(torch.float8_e4m3fn), scales


def per_block_cast_to_fp8(x: Tensor, *_: object) -> Scaled:
    """x ``[M, K]`` as fp8 with one scale a 128 x 128 block."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK)).float()
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448.0
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return values.to(torch.float8_e4m3fn), scales
