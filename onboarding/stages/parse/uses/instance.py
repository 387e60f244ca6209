"""Small real instances of a model's own classes: same code and settings, real tensors, small sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def small_instance(module: nn.Module, sizes: Mapping[int, int], generator: torch.Generator) -> Any:
    """A copy of a module (of fake tensors) with real random fp32 parameters.

    Args:
        module: any module; its class's ``__init__`` is not run again.
        sizes: size in the model -> size in the copy, applied to parameter shapes and to integer settings alike.
        generator: draws the parameters.
    """
    clone = copy.copy(module)
    state = clone.__dict__
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        state[name] = type(state[name])()
    state["_parameters"] = {
        name: None if p is None else nn.Parameter(_random(p, sizes, generator))
        for name, p in module._parameters.items()
    }
    state["_buffers"] = {
        name: None if b is None else _random(b, sizes, generator) for name, b in module._buffers.items()
    }
    state["_modules"] = {
        name: None if child is None else small_instance(child, sizes, generator)
        for name, child in module._modules.items()
    }
    for name, value in list(state.items()):
        if not name.startswith("_"):
            state[name] = _resized(value, sizes)
    return clone


def _resized(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return sizes.get(value, value)
    if isinstance(value, tuple) and all(isinstance(v, int) for v in value):
        return tuple(sizes.get(v, v) for v in value)
    return value


def _random(tensor: torch.Tensor, sizes: Mapping[int, int], generator: torch.Generator) -> torch.Tensor:
    shape = [sizes.get(size, size) for size in tensor.shape]
    if not tensor.is_floating_point():
        return torch.zeros(shape, dtype=tensor.dtype)
    return torch.randn(shape, generator=generator) * (0.5 if len(shape) > 1 else 1.0)


def with_eager_experts(module: nn.Module) -> None:
    """Let an experts module run its own loop, whatever the model's configuration chose."""
    config: Any = copy.copy(module.config)
    config._experts_implementation_internal = "eager"
    module.__dict__["config"] = config
