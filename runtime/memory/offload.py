"""Optimizer state in host memory: it visits the device one parameter at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class HostState:
    """Wraps an optimizer so that its state rests on the host; values and updates stay exactly the same.

    Args:
        optimizer: of torch; its update of one parameter must not read another's state (AdamW, Muon).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        for group in optimizer.param_groups:
            group["foreach"] = False

    def step(self) -> None:
        """Update every parameter, its state on the device only meanwhile."""
        members = [list(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = []
        try:
            for group, parameters in zip(self.param_groups, members, strict=True):
                for parameter in parameters:
                    if parameter.grad is not None:
                        self._one(group, parameter)
                group["params"] = []
        finally:
            for group, parameters in zip(self.param_groups, members, strict=True):
                group["params"] = parameters

    def _one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        group["params"] = [parameter]
        self.move(parameter, parameter.device)
        self.inner.step()
        self.move(parameter, torch.device("cpu"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def move(self, parameter: nn.Parameter, device: torch.device) -> None:
        """The state of one parameter; its step counter stays where the optimizer wants it."""
        state = self.state.get(parameter)
        for name, value in (state or {}).items():
            if isinstance(value, Tensor) and value.ndim > 0:
                assert state is not None
                state[name] = _to(value, device)


def _to(value: Tensor, device: torch.device) -> Any:
    if isinstance(value, DTensor):  # its mesh stays the device's: only where the bytes lie changes
        value._local_tensor = _plain(value._local_tensor, device)
        return value
    return _plain(value, device)


def _plain(value: Tensor, device: torch.device) -> Tensor:
    if value.device == device:
        return value
    if device.type == "cpu" and value.device.type == "cuda":
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value)
        return host
    return value.to(device, non_blocking=True)
