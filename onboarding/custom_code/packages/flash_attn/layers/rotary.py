"""Rotary embeddings in flash-attn's layout."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **_: object
) -> Tensor:
    """x ``[B, T, H, D]``, cos and sin ``[T, R / 2]``: the first R channels turn, in halves or in neighbouring pairs."""
    turned = 2 * cos.shape[-1]
    cos, sin = cos[: x.shape[1], None], sin[: x.shape[1], None]
    head, rest = x[..., :turned], x[..., turned:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([joined, rest], -1).to(x.dtype)


apply_rotary_emb_func = apply_rotary_emb
