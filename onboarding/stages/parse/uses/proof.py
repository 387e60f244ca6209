"""Numerical proof that a module and an operator spec are the same function, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec

Tensors = Mapping[str, torch.Tensor | None]
FP32_ROUNDING = 1e-5
"""Relative RMS difference that fp32 arithmetic may leave against fp64 (short sums; 1e-7 a step)."""
FP32_RECURRENCE = 1e-4
"""The same for a recurrence over a sequence in fp32."""


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over the RMS of what is expected; infinite for NaN or another shape."""
    if value.shape != expected.shape:
        return float("inf")
    value, expected = value.detach().double(), expected.detach().double()
    difference = value - expected
    scale = expected.pow(2).mean().sqrt().clamp_min(1e-30)
    error = float(difference.pow(2).mean().sqrt() / scale)
    return error if error == error else float("inf")


def _gradients(
    outputs: Mapping[str, torch.Tensor], inputs: Tensors, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    wanted = {name: t for name, t in inputs.items() if t is not None and t.requires_grad}
    total = sum((outputs[name].double() * weights[name]).sum() for name in weights)
    assert isinstance(total, torch.Tensor)
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    return {
        name: g if g is not None else torch.zeros_like(t) for (name, t), g in zip(wanted.items(), found, strict=True)
    }


def _fresh(tensors: Tensors, differentiable: set[str], dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    fresh: dict[str, torch.Tensor | None] = {}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            fresh[name] = tensor
        else:
            fresh[name] = tensor.detach().to(dtype).requires_grad_(name in differentiable)
    return fresh


def same_function(
    run: Callable[[dict[str, torch.Tensor | None]], dict[str, torch.Tensor]],
    spec: OperatorSpec,
    tensors: Tensors,
    tolerance: float = FP32_ROUNDING,
) -> bool:
    """Whether ``run`` in fp32 equals the family's reference in fp64, outputs and gradients.

    Args:
        run: the module's own function on tensors named as in ``spec.inputs()``; returns named outputs.
        spec: what is claimed.
        tensors: inputs by name; floating ones are cast as needed.
        tolerance: largest relative RMS error of any output or gradient.
    """
    reference = family_module(spec.family, "reference").reference
    differentiable = {role.name for role in spec.inputs() if role.differentiable}
    narrow, wide = _fresh(tensors, differentiable, torch.float32), _fresh(tensors, differentiable, torch.float64)
    try:
        got = run(narrow)
    except Exception:  # the claim's inputs do not fit the module: then it is not this operator
        return False
    expected = reference(wide, spec)
    generator = torch.Generator().manual_seed(7)
    weights = {
        name: torch.randn(got[name].shape, generator=generator, dtype=torch.float64)
        for name in expected
        if got.get(name) is not None and expected[name] is not None and got[name].shape == expected[name].shape
    }
    if set(weights) != set(got):
        return False
    pairs = [(got[name], expected[name]) for name in weights]
    gradients, expected_gradients = _gradients(got, narrow, weights), _gradients(expected, wide, weights)
    pairs += [(gradients[name], expected_gradients[name]) for name in gradients]
    return all(relative_error(value, wanted) <= tolerance for value, wanted in pairs)
