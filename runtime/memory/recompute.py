"""Blocks whose activations are not kept: they run again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from runtime.model import blocks

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def recompute_blocks(model: nn.Module, contexts: Contexts = noop_context_fn) -> int:
    """Wrap the forward of every block; parameters and their names stay as they are.

    Args:
        model: before or after sharding: what a sharded block gathers is gathered outside its forward.
        contexts: made anew for every call: one context for the forward pass, one for the recomputation.

    Returns:
        How many blocks were wrapped.
    """
    found = blocks(model)
    for _, block in found:
        _wrap(block, contexts)
    return len(found)


def _wrap(block: nn.Module, contexts: Contexts) -> None:
    own = block.__dict__.get("forward") or MethodType(type(block).forward, block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = MethodType(forward, block)
