"""Attention that a model asks of torch itself: one node, like attention behind transformers' interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_torch_attention = F.scaled_dot_product_attention


def torch_attention_leaf(model: nn.Module, sink: Any, attention: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A replacement for ``F.scaled_dot_product_attention``: q [B, H, T, D], k, v [B, HK, S, D] -> [B, H, T, DV].

    Args:
        model: to which the calling module belongs.
        sink: the tracer.
        attention: the leaf behind the interface.
    """

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.dim() != 4:
            return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        module = model.get_submodule(sink.path)
        # what a mask hides cannot be read without values: in a language model it hides the future
        causal = is_causal or attn_mask is not None
        out: torch.Tensor = attention(module, query, key, value, attn_mask, is_causal=causal, scaling=scale)[0]
        return out.transpose(1, 2)

    return scaled_dot_product_attention


def names_of_torch_attention(modules: list[Any]) -> list[tuple[Any, str]]:
    """(module, attribute) under which modeling files imported torch's function."""
    return [(m, name) for m in modules for name, value in vars(m).items() if value is _torch_attention]
