"""Attention over ``[B, T, H, D]``, and over packed sequences ``[total, H, D]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onboarding.custom_code.standins import attention, packed, refuse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """q ``[B, T, H, D]``, k and v ``[B, S, HK, D]`` -> ``[B, T, H, DV]``; causal masks are aligned at the end."""
    refuse(alibi_slopes=alibi_slopes is not None, return_attn_probs=return_attn_probs)
    left, right = window_size
    return attention(
        q, k, v, causal=causal, scale=softmax_scale, window=(left, right), softcap=softcap, dropout=dropout_p
    )


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """qkv ``[B, T, 3, H, D]``."""
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """kv ``[B, S, 2, HK, D]``."""
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Each packed sequence by itself; q ``[total, H, D]``."""
    pairs = zip(packed(cu_seqlens_q), packed(cu_seqlens_k), strict=True)
    parts = [flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], *args, **kwargs)[0] for (a, b), (c, d) in pairs]
    return torch.cat(parts) if parts else q.new_empty(0, q.shape[1], v.shape[-1])
