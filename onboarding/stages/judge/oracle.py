"""The expected values of one call, how far a result may be from them, and proof that the tolerance can tell.

Runs in the judge's process only: the candidate's process never sees any of this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_templates
from kernel_templates import tolerance
from kernel_templates.configs import Chooser
from kernel_templates.registry import FAMILIES, family_module
from kernel_templates.spec import OperatorSpec

Tensors = dict[str, Tensor | None]
VANISHING = 2.0**-110
"""Sixteen binades above the smallest normal fp32 number."""
SMALL = 4_000_000
"""Elements of all inputs below which references run on the CPU: their recurrences are many tiny operations."""
TEMPLATES = Path(kernel_templates.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One output or gradient of one call."""

    name: str
    """``y``, ``grad x``."""
    value: Tensor
    """fp64."""
    dtype: torch.dtype
    """That the result must have."""
    reference_error: float
    """Of the family's rounded reference."""
    limit: float

    def compare(self, actual: Tensor) -> tolerance.Comparison:
        """Compare a result of the same shape; what vanishes counts as zero on both sides."""
        return tolerance.compare(without_vanishing(actual), self.value)


@dataclass(kw_only=True)
class Call:
    """Inputs of one call, what flows into backward, and what must come out."""

    spec: OperatorSpec
    tensors: Tensors
    upstream: dict[str, Tensor]
    """Gradient of each output that gets one."""
    needs: frozenset[str]
    """Inputs that require a gradient."""
    expected: dict[str, Expected] = field(default_factory=dict)
    repeats: int = 1
    """How often one value stands in an input: at most so many elements of a result share one rounding."""
    upstream_repeats: int = 1
    """The same of what flows into backward, which outputs do not see."""
    well_posed: bool = True
    """Whether a kernel can be held to the limits: the family's own algorithm meets its cap, everything is finite, no
    result is zero because equal terms cancel (:func:`cancelled`), and (fp32) no exact result moves by half its limit
    when the inputs move by a few units in the last place, as one does where a value lies within rounding of a clamp.
    """


def without_vanishing(t: Tensor) -> Tensor:
    """``t`` with zeros for values that fp32 cannot carry through a product: fp64 keeps e^-200, no kernel has to."""
    return torch.where(t.abs() < VANISHING, torch.zeros((), dtype=t.dtype, device=t.device), t)


def working_dtype(spec: OperatorSpec) -> torch.dtype:
    """The dtype that an operator computes products in and stores activations in."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def differentiable(spec: OperatorSpec, tensors: Tensors) -> frozenset[str]:
    """Inputs that are there and whose gradient is part of the contract."""
    roles = {role.name for role in spec.inputs() if role.differentiable}
    return frozenset(n for n, t in tensors.items() if t is not None and n in roles and t.is_floating_point())


@functools.cache
def chooser(family: str) -> Chooser:
    """The family's own configurations."""
    return Chooser.from_folder(TEMPLATES / family / "configs", name=family)


def contract(spec: OperatorSpec, tensors: Tensors) -> dict[str, Tensor]:
    """Empty outputs with the dtype, shape and strides that the family's template promises."""
    template = family_module(spec.family, "template")
    outputs: dict[str, Tensor] = template.outputs_like(tensors, spec, config_for(spec, tensors))[0]
    return outputs


def config_for(spec: OperatorSpec, tensors: Tensors) -> dict[str, Any]:
    """The configuration in force for these tensors; a family without configurations needs none."""
    if spec.family not in FAMILIES:
        return {}
    template = family_module(spec.family, "template")
    device = next(t.device for t in tensors.values() if t is not None)
    return chooser(spec.family)(template.bucket(tensors, spec), device)


def draw_upstream(spec: OperatorSpec, tensors: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal gradients for every differentiable output, in its dtype."""
    names = {role.name for role in spec.outputs() if role.differentiable}
    return {
        n: torch.randn(t.shape, generator=generator, device=generator.device).to(t)
        for n, t in contract(spec, tensors).items()
        if n in names
    }


def expect(call: Call) -> Call:
    """Fill in what must come out: fp64 reference, the rounded reference's own error, the limit."""
    outputs = contract(call.spec, call.tensors)
    dtype = working_dtype(call.spec)
    exact = _evaluate(call, torch.float64, rounded=False)
    noise = _squared_errors(call, exact)
    most = max(call.repeats, call.upstream_repeats)
    few = FEW if most == 1 else FEW_ROUNDINGS * most
    counted = shared_count if call.spec.family in OF_PRODUCTS else effective_count
    if dtype is not torch.float32 and any(counted(n) < few for n in noise.values()):
        draws = [noise] + [_squared_errors(other, None) for other in _neighbours(call, _NEIGHBOURS, 2.0**-6)]
        noise = {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in noise}
    for name, value in exact.items():
        source = call.tensors[name.removeprefix("grad ")] if name.startswith("grad ") else outputs[name]
        assert source is not None
        gradient_of = name.removeprefix("grad ") if name.startswith("grad ") else None
        repeats = call.repeats if gradient_of is None else most
        error, factor = _relative(noise[name], value), luck(max(counted(noise[name]) / repeats, 1.0))
        fair = error <= max(tolerance.cap(call.spec.family, dtype, gradient_of), tolerance.FLOORS[dtype])
        call.well_posed &= fair and bool(value.isfinite().all())
        call.expected[name] = Expected(
            name=name,
            value=value,
            dtype=source.dtype,
            reference_error=error,
            limit=tolerance.limit(call.spec.family, dtype, error * factor / tolerance.FACTOR, gradient_of),
        )
    call.well_posed = call.well_posed and not cancelled(call)
    if dtype is torch.float32:
        moved = _evaluate(_neighbours(call, 1, _FEW_ULPS)[0], torch.float64, rounded=False)
        call.well_posed &= all(e.compare(moved[n]).error <= 0.5 * e.limit for n, e in call.expected.items())
    return call


# ---- results that cancel -------------------------------------------------------------------------------------------
#
# A result that holds only zeros must be met by zeros. Where nothing leads to it, that is right: whatever else is there
# was never computed. Where equal terms of opposite sign cancel (the gradient of a weight that is divided by itself, of
# a softmax over one element), every honest kernel leaves some rounding, and no relative limit means anything. Monte
# Carlo arithmetic (Parker, "Monte Carlo Arithmetic", 1997) tells the two apart: when every operation of the reference
# rounds at random, products with zero stay zero and cancelled sums do not.

_JITTER = 2.0**-20


class _RoundsAtRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies the floating results of every operation by 1 + noise, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result  # a view, or an operation in place
        return pytree.tree_map_only(Tensor, self._moved, result)

    def _moved(self, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        noise = torch.rand(t.shape, generator=self.generator, dtype=torch.float64).to(t)
        return t + t * (noise * (2 * _JITTER) - _JITTER)


def cancelled(call: Call) -> list[str]:
    """Names of the expected results that hold only zeros because equal terms cancel."""
    zeros = [n for n, e in call.expected.items() if e.value.numel() and not bool(e.value.any())]
    if not zeros:
        return []
    with _RoundsAtRandom():
        moved = _evaluate(call, torch.float64, rounded=False)
    return [n for n in zeros if bool(moved[n].any())]


# ---- how far an honest result of few elements may be off ----------------------------------------------------------
#
# Kernel and rounded reference round at the same places but not to the same side: two draws of the same noise. Over
# many elements their RMS agree closely and 1.5 is ample. Over few it is not: a single element may be 1.5 sigma off
# one time in seven. So where few elements make up the error, its size is estimated from several inputs that differ
# in their last bits, and the factor is the quantile of the chi-squared distribution with that many degrees. A value
# that is repeated is rounded once for all: its elements count as one.

OF_PRODUCTS = frozenset(("moe", "linear_attention", "linear_cross_entropy", "sparse_attention"))
"""Families whose kernels round the operands of products: one rounding reaches a whole line of the result."""
FEW = 300
FEW_ROUNDINGS = 50
"""From so many on the factor is 1.5 anyway."""
_NEIGHBOURS = 3
_SIGMAS = 5.0
_FEW_ULPS = 2.0**-21


def effective_count(squared: Tensor) -> float:
    """How many elements share in an error: (sum s)^2 / sum s^2 of its squares; infinite for no error."""
    total = float(squared.sum())
    return total**2 / float(squared.square().sum()) if total > 0 and math.isfinite(total) else math.inf


def shared_count(squared: Tensor) -> float:
    """How many roundings share in the error of a result that comes out of matrix products.

    An operand that is rounded before a product (an activation, a probability) moves a whole row or column of the
    result at once: the elements of one such line count together, along the dim where fewest lines make up the error.
    """
    lines = [effective_count(squared.sum(d)) for d in range(squared.ndim) if squared.ndim > 1 and squared.shape[d] > 1]
    return min([effective_count(squared), *lines])


def luck(count: float) -> float:
    """What the RMS over ``count`` elements may exceed sigma by: sqrt(chi^2 / count) at five sigma, at least 1.5.

    Wilson and Hilferty's approximation (1931) of the quantile.
    """
    spread = 2.0 / (9.0 * count)
    return max(tolerance.FACTOR, math.pow(1.0 - spread + _SIGMAS * math.sqrt(spread), 1.5))


def _neighbours(call: Call, count: int, reach: float) -> list[Call]:
    """The same call with every value moved by up to ``reach`` of itself: other roundings of the same problem."""
    generator = torch.Generator().manual_seed(0)

    def moved(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        step = (torch.rand(t.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(t.device) * reach
        return (t.double() * (1 + step)).to(t.dtype)

    result = []
    for _ in range(count):
        tensors = {n: moved(t) for n, t in call.tensors.items()}
        upstream = {n: g for n, t in call.upstream.items() if (g := moved(t)) is not None}
        result.append(dataclasses.replace(call, tensors=tensors, upstream=upstream, expected={}))
    return result


def _squared_errors(call: Call, exact: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Squared deviation of the rounded reference from the exact one, by tensor."""
    exact = exact or _evaluate(call, torch.float64, rounded=False)
    own = _evaluate(call, torch.float32, rounded=True)
    return {name: (own[name].double() - value).square() for name, value in exact.items()}


def _relative(squared: Tensor, value: Tensor) -> float:
    """RMS of an error relative to ``value``; 0 for no error, infinite where zeros are missed."""
    if squared.numel() == 0 or not bool(squared.any()):
        return 0.0
    size = float(value.square().mean().sqrt())
    return float(squared.mean().sqrt()) / size if size > 0 else math.inf


def _evaluate(call: Call, dtype: torch.dtype, *, rounded: bool) -> dict[str, Tensor]:
    """Outputs and gradients by the family's reference, in ``dtype``."""
    reference = family_module(call.spec.family, "reference")
    small = sum(t.numel() for t in call.tensors.values() if t is not None) < SMALL
    tensors: Tensors = {}
    for name, tensor in call.tensors.items():
        if tensor is not None:
            tensor = tensor.detach().to("cpu") if small else tensor.detach()
            if tensor.is_floating_point():
                tensor = tensor.to(dtype, copy=True).requires_grad_(name in call.needs)
        tensors[name] = tensor
    if rounded:
        mma_dtype = working_dtype(call.spec)
        outputs = reference.rounded_reference(tensors, call.spec, mma_dtype, config_for(call.spec, call.tensors))
    else:
        outputs = reference.reference(tensors, call.spec)
    results = {name: without_vanishing(value.detach()) for name, value in outputs.items()}
    sources = [(outputs[n], g.to(outputs[n])) for n, g in call.upstream.items() if outputs[n].requires_grad]
    leaves: dict[str, Tensor] = {n: t for n in sorted(call.needs) if (t := tensors[n]) is not None}
    if leaves and sources:
        found = torch.autograd.grad(
            [s for s, _ in sources], list(leaves.values()), [g for _, g in sources], allow_unused=True
        )
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            results[f"grad {name}"] = torch.zeros_like(leaf) if gradient is None else without_vanishing(gradient)
    return results


def sensitivity(expected: Expected, call: Call) -> float | None:
    """The smallest share of its limit by which a worthless result would miss; above 1 the tolerance can tell.

    The worthless results: zeros, a constant, what is given in the same shape (inputs for an output, what flows in for
    a gradient, unless that is the right result), a flipped sign, half the mantissa. None where nothing can be told: no
    elements, or an exact result of zeros.
    """
    value = expected.value
    if value.numel() == 0 or not bool(value.any()):
        return None
    impostors = [torch.zeros_like(value), -value]
    if expected.dtype.is_floating_point:  # a choice (integers) has no mantissa
        impostors.append(half_mantissa(value, working_dtype(call.spec)))
    if value.numel() > 1:
        impostors.append(value.mean().expand_as(value))
    given = call.upstream if expected.name.startswith("grad ") else call.tensors
    errors = [expected.compare(impostor).error for impostor in impostors]
    same = [expected.compare(t).error for t in given.values() if t is not None and t.shape == value.shape]
    errors += [error for error in same if error > 0]
    return min(errors) / expected.limit if all(math.isfinite(e) for e in errors) else 0.0


def half_mantissa(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` (fp64) rounded to half of the significant bits of ``dtype``."""
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype] // 2
    fraction, exponent = torch.frexp(value)
    return torch.ldexp((fraction * 2.0**bits).round() / 2.0**bits, exponent)
