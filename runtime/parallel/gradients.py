"""What the loop does with gradients between backward and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from runtime.experts import balance
from runtime.experts.balance import LoadReport
from runtime.parallel.state import state_of


def set_gradient_sync(model: nn.Module, last: bool) -> None:
    """Before each micro-batch's forward: reduce gradients only in the step's last one.

    Until then gradients stay whole on each rank; ``finish_gradients`` sums what FSDP does not manage.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)


def finish_gradients(model: nn.Module) -> None:
    """After the step's last backward, on every rank: sum the gradients of replicated parameters over the world."""
    state = state_of(model)
    if state.meshes.dense is None:
        return
    trained = [p for p in state.replicated if p.requires_grad]
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in trained:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for parameters in by_dtype.values():
        flat = torch.cat([_gradient(p).reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        for parameter, piece in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def after_optimizer_step(model: nn.Module) -> LoadReport | None:
    """After every optimizer step, on every rank: move balance biases, choose copies; return the load of all layers."""
    state = state_of(model)
    loads = [(layer.site.name, layer.load) for layer in state.layers]
    report = balance.after_step(loads, torch.device(state.meshes.device_type))
    for number, layer in enumerate(state.layers):
        if layer.replicas is not None and report is not None:
            layer.replicas.follow(report.load[number])
    return report


@contextmanager
def counting(model: nn.Module, mask: Tensor | None = None, global_tokens: float | None = None) -> Iterator[None]:
    """Around forward *and* backward of a micro-batch: what counts as load.

    Args:
        model: parallelized.
        mask: bool [batch, sequence], true where a token counts; None counts all. Leave out padding.
        global_tokens: tokens of the whole optimizer step over all ranks, the auxiliary loss's denominator.
    """
    loads = [(layer.site.name, layer.load) for layer in state_of(model).layers]
    with balance.counting_only(loads, mask, global_tokens):
        yield
