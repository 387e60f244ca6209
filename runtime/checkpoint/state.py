"""What a checkpoint holds: trained parameters, stored buffers, the optimizer's state, all by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

State = dict[str, Tensor]


def collect(model: nn.Module, optimizers: list[Any]) -> State:
    """The tensors of a run, by names that say nothing of ranks. They are the run's own: loading into them is enough.

    Args:
        model: sharded.
        optimizers: whose state exists (:func:`create_optimizer_state`).
    """
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    state: State = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    stored = model.state_dict(keep_vars=True).keys()
    state |= {f"buffer.{n}": b for n, b in model.named_buffers() if n in stored}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return state


@torch.no_grad()
def create_optimizer_state(optimizers: list[Any]) -> None:
    """Make the state that a first step would make, without moving a weight: gradients and rates are zero meanwhile."""
    for optimizer in optimizers:
        kept = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
        rates = [g["lr"] for g in optimizer.param_groups]
        for parameter, _ in kept:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in kept:
            parameter.grad = gradient
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    value.zero_()


def staged(state: State) -> State:
    """A copy in host memory that training cannot change any more."""
    return {name: _on_host(value) for name, value in state.items()}


def size_of(state: State) -> int:
    """Bytes of this rank's share."""
    return sum(local(v).numel() * v.element_size() for v in state.values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _on_host(value: Tensor) -> Tensor:
    copy = local(value).detach().to("cpu", copy=True)
    if not isinstance(value, DTensor):
        return copy
    return DTensor(copy, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
