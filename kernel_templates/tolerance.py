"""The only tolerance table and the only ``assert_close``.

The error of a tensor is its relative RMS error, RMS(actual - expected) / RMS(expected), against the fp64 reference.
It may be at most::

    limit = max(1.5 * min(e, cap), floor)

with ``e`` the error of the family's ``rounded_reference`` on the same input: the same algorithm, with the operands
of matrix products and the stored intermediates rounded. ``cap`` bounds what a family's algorithm may claim for
itself, so that a badly conditioned algorithm cannot buy itself room.

Floors
    A result that is rounded once to p significant bits lies within half a unit in the last place. For evenly spread
    errors that is an RMS of ulp / sqrt(12), relative to the smallest value of the binade 2^(1-p) / sqrt(12):
    2.26e-3 for bf16 (p = 8), 2.8e-4 for fp16 (p = 11). No kernel can promise less on unlucky mantissas, so these
    are the floors, with a tenth added for the fp32 work before the rounding.
    An fp32 result (u = 2^-24) is not limited by its last rounding but by the order of accumulation: a sequential sum
    of n terms of random sign errs by about u sqrt(n) / sqrt(6) (Higham, "Accuracy and Stability of Numerical
    Algorithms", 2002, section 4.5, in its random-walk form). 1e-5 allows n = 160,000 terms.
    fp64 has no kernels; its floor serves tests of references against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 1.5
"""A kernel may err this much more than its family's rounded reference."""

FLOORS: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 3.1e-4,
    torch.bfloat16: 2.5e-3,
}


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The largest error that a family's rounded reference may claim, for bf16."""

    output: float
    gradient: float
    by_gradient: tuple[tuple[str, float], ...] = ()
    """Gradients of single inputs that are worse conditioned than the others."""


CAPS: dict[str, Cap] = {
    "norm": Cap(output=4e-3, gradient=5e-3),
    "gated_activation": Cap(output=4e-3, gradient=5e-3),
    "routing": Cap(output=4e-3, gradient=5e-3),
    "rotary": Cap(output=4e-3, gradient=5e-3),
    "short_convolution": Cap(output=4e-3, gradient=5e-3),
    # gradients: up to two roundings of dz, one of the sum, one after scaling by what flows in
    "linear_cross_entropy": Cap(output=4e-3, gradient=5e-3),
    "hyper_connection": Cap(output=4e-3, gradient=5e-3),
    # <dh, h> is taken from the rounded h; what it leaves of a score's gradient is a difference
    "attention_residual": Cap(output=4e-3, gradient=5e-3, by_gradient=(("query", 1e-2),)),
    # gradients of products are rounded before the next product, and each key's part once
    "indexer": Cap(output=4e-3, gradient=6e-3),
    # gradients: dS or P rounded, delta from a rounded output, each key's part once, the result; a sink's gradient is a
    # sum of deltas of either sign
    "sparse_attention": Cap(output=4e-3, gradient=5e-3, by_gradient=(("sink", 1e-2),)),
    "moe": Cap(output=8e-3, gradient=1e-2),
    # the gradients of decay and beta are differences of nearly equal sums
    "linear_attention": Cap(output=8e-3, gradient=1e-2, by_gradient=(("g", 2e-2), ("beta", 2e-2))),
    # operators known by their reference only: its matrix products with rounded operands are the yardstick
    "novel": Cap(output=8e-3, gradient=2e-2),
}

# caps of other dtypes follow bf16's by the ratio of their unit roundoffs; fp32 keeps room for exponentials, whose
# argument error grows with the argument
_CAP_SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**-3, torch.float32: 2.0**-9, torch.float64: 2.0**-30}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far one tensor is from its reference."""

    error: float
    """Relative RMS error; ``inf`` where either side has a NaN or an infinity, or a zero reference is missed."""
    worst_index: tuple[int, ...]
    """Where the absolute error is largest; the first non-finite element if there is one; empty for no elements."""
    worst_actual: float
    worst_expected: float


def cap(family: str, dtype: torch.dtype, gradient_of: str | None = None) -> float:
    """The largest error that ``rounded_reference`` may claim for an output, or for the gradient of one input.

    Raises:
        KeyError: unknown family.
    """
    entry = CAPS[family]
    if gradient_of is None:
        bf16 = entry.output
    else:
        bf16 = dict(entry.by_gradient).get(gradient_of, entry.gradient)
    return bf16 * _CAP_SCALE[dtype]


def limit(family: str, dtype: torch.dtype, reference_error: float, gradient_of: str | None = None) -> float:
    """The largest relative RMS error that a kernel may have.

    Args:
        family: template family, a key of ``CAPS``.
        dtype: dtype in which the operator works (its spec's), not merely that of this tensor.
        reference_error: error of the family's rounded reference on the same input.
        gradient_of: the input whose gradient is compared, or None for an output.

    Raises:
        KeyError: unknown family.
    """
    own = cap(family, dtype, gradient_of)
    e = min(reference_error, own) if math.isfinite(reference_error) else own
    return max(FACTOR * e, FLOORS[dtype])


def compare(actual: Tensor, expected: Tensor) -> Comparison:
    """Compare ``actual`` (any dtype) with ``expected`` (fp64) of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shape {tuple(actual.shape)} is not the expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return Comparison(error=0.0, worst_index=(), worst_actual=0.0, worst_expected=0.0)
    a = actual.detach().to(device=expected.device, dtype=torch.float64)
    b = expected.detach().to(torch.float64)
    deviation = (a - b).abs()
    finite = a.isfinite() & b.isfinite()
    if bool(finite.all()):
        flat = int(deviation.argmax())
        # scale first: squares of values near 1e-200 would vanish
        scale, worst = float(b.abs().max()), float(deviation.max())
        if worst == 0.0:
            error = 0.0
        elif scale == 0.0:
            error = math.inf
        else:
            numerator = worst * float((deviation / worst).square().mean().sqrt())
            error = numerator / (scale * float((b / scale).square().mean().sqrt()))
    else:
        flat = int((~finite).to(torch.uint8).argmax())
        error = math.inf
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    return Comparison(error=error, worst_index=index, worst_actual=float(a[index]), worst_expected=float(b[index]))


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS(actual - expected) / RMS(expected); 0 for no elements, ``inf`` for anything not finite.

    A reference that is zero everywhere is met only by zeros.

    Raises:
        ValueError: the shapes differ.
    """
    return compare(actual, expected).error


def assert_close(name: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    """Raise unless ``actual`` is within ``limit`` of ``expected`` (fp64); return the error.

    Raises:
        AssertionError: the error exceeds the limit, or shapes differ; says where and by how much.
    """
    try:
        found = compare(actual, expected)
    except ValueError as problem:
        raise AssertionError(f"{name}: {problem}") from problem
    if not found.error <= limit:
        raise AssertionError(
            f"{name}: relative RMS error {found.error:.3e} exceeds {limit:.3e}; worst at {list(found.worst_index)}: "
            f"{found.worst_actual:.8g} instead of {found.worst_expected:.8g}"
        )
    return found.error
