"""The mask helpers of earlier transformers (``transformers.modeling_attn_mask_utils``), as they were documented.

Masks are additive: 0 where a query may look, the dtype's lowest number where it may not; ``[B, 1, T, S]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _lowest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min


def _prepare_4d_causal_attention_mask(
    attention_mask: Tensor | None,
    input_shape: Any,
    inputs_embeds: Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal, optionally in a window, without padding where ``attention_mask`` ``[B, S]`` is 0."""
    batch, queries = input_shape[0], input_shape[-1]
    keys = queries + past_key_values_length
    device, dtype = inputs_embeds.device, inputs_embeds.dtype
    row = torch.arange(past_key_values_length, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None]
    hidden = column > row
    if sliding_window is not None:
        hidden = hidden | (column <= row - sliding_window)
    hidden = hidden[None, None].expand(batch, 1, queries, keys)
    if attention_mask is not None and attention_mask.dim() == 2:
        hidden = hidden | (attention_mask[:, None, None, :] == 0)
    return torch.zeros(batch, 1, queries, keys, dtype=dtype, device=device).masked_fill(hidden, _lowest(dtype))


def _prepare_4d_causal_attention_mask_for_sdpa(
    attention_mask: Tensor | None,
    input_shape: Any,
    inputs_embeds: Tensor,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Tensor | None:
    """The same; None where torch's own causal flag says it all."""
    if attention_mask is None and sliding_window is None and not past_key_values_length:
        return None
    return _prepare_4d_causal_attention_mask(
        attention_mask, input_shape, inputs_embeds, past_key_values_length, sliding_window
    )


def _prepare_4d_attention_mask(mask: Tensor, dtype: torch.dtype, tgt_len: int | None = None) -> Tensor:
    """Padding only: ``[B, S]`` of ones and zeros to ``[B, 1, T, S]``."""
    batch, keys = mask.shape
    kept = mask[:, None, None, :].expand(batch, 1, tgt_len or keys, keys)
    return torch.zeros(kept.shape, dtype=dtype, device=mask.device).masked_fill(kept == 0, _lowest(dtype))


class AttentionMaskConverter:
    """Turns padding masks into additive ones."""

    def __init__(self, is_causal: bool, sliding_window: int | None = None) -> None:
        self.is_causal, self.sliding_window = is_causal, sliding_window

    def to_4d(
        self, attention_mask_2d: Tensor, query_length: int, dtype: torch.dtype, key_value_length: Any = None
    ) -> Tensor:
        """``[B, S]`` to ``[B, 1, T, S]``."""
        if not self.is_causal:
            return _prepare_4d_attention_mask(attention_mask_2d, dtype, query_length)
        past = (key_value_length or query_length) - query_length
        like = torch.empty((), dtype=dtype, device=attention_mask_2d.device)
        shape = (attention_mask_2d.shape[0], query_length)
        return _prepare_4d_causal_attention_mask(attention_mask_2d, shape, like, past, self.sliding_window)

    @staticmethod
    def _unmask_unattended(expanded_mask: Tensor, min_dtype: float) -> Tensor:
        """Rows that see nothing see everything: their outputs are not used, and softmax stays finite."""
        return expanded_mask.mul(~torch.all(expanded_mask == min_dtype, dim=-1, keepdim=True))
