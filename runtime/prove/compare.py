"""How far a run over ranks is from one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_templates.tolerance import FACTOR, FLOORS, relative_rms
from runtime.prove.run import Outcome

EXACT = 1e-6
"""Relative, for fp64 runs: models round some steps to fp32 whatever their dtype, at 6e-8."""
NOISE = 1e-10
"""A gradient this much smaller than the largest is rounding of a sum that is zero, and is compared to the largest."""


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


def compare(actual: Outcome, expected: Outcome, own: Outcome | None, dtype: torch.dtype) -> Difference:
    """Compare a run over ranks with the fp64 run of one process.

    Args:
        actual: over ranks.
        expected: one process, fp64.
        own: one process in the case's dtype; None for fp64 cases. Its error sets the limit, as a rounded reference's.
        dtype: of the case.
    """
    shares: dict[str, float] = {}
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "weight": 0.0}
    ok = actual.gradients.keys() == expected.gradients.keys() and actual.weights.keys() == expected.weights.keys()
    for kind, name, a, e, o in _pairs(actual, expected, own):
        error = _error(a, e, expected, kind)
        limit = EXACT
        if own is not None:
            assert o is not None
            limit = max(FACTOR * _error(o, e, expected, kind), FLOORS[dtype])
        worst[kind] = max(worst[kind], error)
        shares[f"{kind} {name}".strip()] = error / limit
    for name, counts in expected.counts.items():
        # whole numbers; rounding may move a token between two experts, which shows in the tensors
        if own is None and not torch.equal(actual.counts[name], counts):
            shares[f"count {name}"] = float("inf")
    name = max(shares, key=lambda n: shares[n])
    return Difference(**worst, worst=f"{name} at {shares[name]:.2g}", ok=ok and shares[name] <= 1.0)


def _pairs(
    actual: Outcome, expected: Outcome, own: Outcome | None
) -> list[tuple[str, str, Tensor, Tensor, Tensor | None]]:
    rows: list[tuple[str, str, Tensor, Tensor, Tensor | None]] = []
    for kind, field in (("loss", "losses"), ("norm", "norms")):
        values = [_tensors(o, field) for o in (actual, expected)]
        rows.append((kind, "", values[0], values[1], None if own is None else _tensors(own, field)))
    for kind, field in (("gradient", "gradients"), ("weight", "weights")):
        ours, theirs = getattr(actual, field), getattr(expected, field)
        rounded = {} if own is None else getattr(own, field)
        rows += [(kind, name, ours[name], theirs[name], rounded.get(name)) for name in theirs if name in ours]
    return rows


def _tensors(outcome: Outcome, field: str) -> Tensor:
    return torch.tensor(getattr(outcome, field), dtype=torch.float64)


def _error(a: Tensor, e: Tensor, expected: Outcome, kind: str) -> float:
    if a.shape != e.shape:
        return float("inf")
    if kind == "gradient" and e.numel():
        largest = max(float(g.abs().max()) for g in expected.gradients.values())
        if float(e.abs().max()) < NOISE * largest:
            return float((a.double() - e.double()).abs().max()) / largest
    return relative_rms(a, e)
