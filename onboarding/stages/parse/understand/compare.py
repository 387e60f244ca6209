"""Numerical agreement of a part of the twin with a definition: outputs and gradients, fp32 against fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onboarding.stages.parse.uses.proof import relative_error

CLOSE = 2e-4
"""Largest relative RMS error that fp32 arithmetic may leave in an output or a gradient of a small part."""
RECURRENT = 1e-3
"""The same for a recurrence over a sequence."""

Function = Callable[[dict[str, Tensor]], Tensor]


def disagreement(actual: Function, reference: Function, inputs: Mapping[str, Tensor], seed: int = 3) -> float:
    """Worst relative RMS error of ``actual`` in fp32 against ``reference`` in fp64, over the output and every gradient.

    Args:
        actual: the part of the model.
        reference: what is claimed of it.
        inputs: floating tensors are differentiated; they are copied, so neither function sees the model's graph.
    """
    narrow = {name: _leaf(t, torch.float32) for name, t in inputs.items()}
    wide = {name: _leaf(t, torch.float64) for name, t in inputs.items()}
    with torch.enable_grad():
        got, expected = actual(narrow), reference(wide)
        if got.shape != expected.shape:
            return float("inf")
        error = relative_error(got, expected)
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        mine, theirs = _gradients(got, narrow, weight), _gradients(expected, wide, weight)
    scale = max((float(g.pow(2).mean().sqrt()) for g in theirs.values()), default=0.0)
    for name, gradient in theirs.items():
        own = float(gradient.pow(2).mean().sqrt())
        if own < 1e-9 * max(scale, 1e-30):  # no gradient in the definition: then none in the model
            error = max(error, float(mine[name].double().pow(2).mean().sqrt()) / max(scale, 1e-30))
        else:
            error = max(error, relative_error(mine[name], gradient))
    return error


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach()
    return tensor.detach().to(dtype).clone().requires_grad_(True)


def _gradients(output: Tensor, inputs: Mapping[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    wanted = {name: t for name, t in inputs.items() if t.is_floating_point()}
    if not output.requires_grad:
        return {name: torch.zeros_like(t) for name, t in wanted.items()}
    found = torch.autograd.grad((output.double() * weight).sum(), list(wanted.values()), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two tensors hold the same values (shapes may differ in dims of size 1 or in grouping)."""
    if a is b:
        return True
    if a.numel() != b.numel() or a.numel() == 0:
        return False
    return relative_error(a.reshape(-1), b.reshape(-1)) <= tolerance


def columns_of(target: Tensor, source: Tensor) -> tuple[float, Tensor]:
    """How far each column of ``target`` [N, M] is from the nearest column of ``source`` [N, P].

    Returns:
        The worst relative RMS distance, and for each target column its source column.
    """
    target, source = target.detach().double(), source.detach().double()
    chosen = torch.cdist(target.T.contiguous(), source.T.contiguous()).argmin(dim=1)
    difference = (target - source[:, chosen]).pow(2).mean(0).sqrt()
    scale = target.pow(2).mean(0).sqrt().clamp_min(1e-12)
    return float((difference / scale).max()), chosen


class parameters_as:
    """Swap a module's parameters for other tensors for a while."""

    def __init__(self, module: nn.Module, values: dict[str, Tensor]) -> None:
        self.module, self.values = module, values
        self.kept: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> None:
        for name, value in self.values.items():
            owner = self.module.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            self.kept.append((owner, leaf, owner._parameters.pop(leaf)))
            object.__setattr__(owner, leaf, value)

    def __exit__(self, *_: Any) -> None:
        for owner, leaf, parameter in self.kept:
            owner.__dict__.pop(leaf, None)
            owner._parameters[leaf] = parameter
