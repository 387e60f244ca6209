"""How far a run over ranks is from one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_templates.tolerance import FACTOR, FLOORS, relative_rms
from runtime.prove.run import Outcome

EXACT = 1e-6
"""Relative, for fp64 runs: models round some steps to fp32 whatever their dtype, at 6e-8."""
NOISE = 1e-10
"""A gradient this much smaller than the largest is rounding of a sum that is zero, and is compared to the largest."""


KINDS = ("loss", "norm", "gradient", "weight")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest relative errors of one case."""

    loss: float
    norm: float
    gradient: float
    weight: float
    worst: str
    """Name of the tensor that is furthest over its limit, as a share of it."""
    ok: bool


def compare(actual: Outcome, expected: Outcome, own: list[tuple[Outcome, Outcome]], dtype: torch.dtype) -> Difference:
    """Compare a run over ranks with the fp64 run of one process.

    fp64 cases are compared tensor by tensor. In lower precision both runs round, each its own way, so errors are pooled
    over all tensors of a kind and may be at most what the tolerance table allows beside one process's own.

    Args:
        actual: over ranks.
        expected: one process, fp64.
        own: one process in the case's dtype and in fp64, on this data and on neighbouring data; empty for fp64 cases.
            Its largest error sets the limit, as a rounded reference's does. One sample would not do: few directions
            carry most of a small model's error.
        dtype: of the case.
    """
    complete = actual.gradients.keys() == expected.gradients.keys() and actual.weights.keys() == expected.weights.keys()
    if own:
        errors = _pooled(actual, expected)
        samples = [_pooled(rounded, exact) for rounded, exact in own]
        theirs = {kind: max(sample[kind] for sample in samples) for kind in KINDS}
        # the norm cannot be further off than the gradients are
        theirs["norm"] = max(theirs["norm"], theirs["gradient"])
        shares = {kind: error / max(FACTOR * theirs[kind], FLOORS[dtype]) for kind, error in errors.items()}
    else:
        errors = dict.fromkeys(KINDS, 0.0)
        shares = {}
        for kind, name, a, e in _pairs(actual, expected):
            error = _error(a, e, expected, kind)
            errors[kind] = max(errors[kind], error)
            shares[f"{kind} {name}".strip()] = error / EXACT
        for name, counts in expected.counts.items():
            if not torch.equal(actual.counts[name], counts):
                shares[f"count {name}"] = float("inf")
    name = max(shares, key=lambda n: shares[n])
    return Difference(**errors, worst=f"{name} at {shares[name]:.2g}", ok=complete and shares[name] <= 1.0)


def _pooled(actual: Outcome, expected: Outcome) -> dict[str, float]:
    """Relative RMS error over all numbers of a kind."""
    pairs = list(_pairs(actual, expected))
    return {
        kind: relative_rms(
            torch.cat([a.double().flatten() for k, _, a, _ in pairs if k == kind]),
            torch.cat([e.double().flatten() for k, _, _, e in pairs if k == kind]),
        )
        for kind in KINDS
    }


def _pairs(actual: Outcome, expected: Outcome) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    for kind, field in (("loss", "losses"), ("norm", "norms")):
        values = [torch.tensor(getattr(o, field), dtype=torch.float64) for o in (actual, expected)]
        yield kind, "", values[0], values[1]
    for kind, field in (("gradient", "gradients"), ("weight", "weights")):
        ours, theirs = getattr(actual, field), getattr(expected, field)
        for name in theirs:
            if name in ours:
                yield kind, name, ours[name], theirs[name]


def _error(a: Tensor, e: Tensor, expected: Outcome, kind: str) -> float:
    if a.shape != e.shape:
        return float("inf")
    if kind == "gradient" and e.numel():
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        if float(e.abs().max()) < NOISE * largest:
            return float((a.double() - e.double()).abs().max()) / largest
    return relative_rms(a, e)
