"""Compare the candidate's tensors with the reference, layer by layer.

Every error is taken against the reference in the higher precision. The tolerance of a tensor is the project's rule
max(k e, floor of the dtype) with k = 1.5 (more for a tensor with few effective elements, as in the judge): e is the
largest error that the reference itself makes in the lower precision, over several runs whose weights differ by less
than one unit in the last place. So e holds what rounding does at this depth, and how much the model amplifies it; the
floor allows for another order of summation where the reference happens to be lucky.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernel_templates.tolerance import FACTOR, FLOORS
from onboarding.stages.align.result import LayerError
from onboarding.stages.judge.oracle import effective_count, luck

Tensors = Mapping[str, Tensor]
INFINITE = 1e30
"""Stands for an infinite error in stored results: JSON has no infinity."""


def compare_layers(
    candidate: Tensors, low: Sequence[Tensors], high: Tensors, dtype: torch.dtype, letters: Sequence[str]
) -> list[LayerError]:
    """One row a tensor, in the order of the reference.

    Args:
        candidate: tensors of the model with kernels.
        low: the reference in the candidate's precision, several runs.
        high: the reference in the higher precision.
        dtype: the candidate's precision.
        letters: block kind of each layer of the twin.
    """
    rows = []
    for name, expected in high.items():
        if not expected.is_floating_point():
            continue
        spread = max(relative_rms(run.get(name), expected) for run in low)
        tolerance = max(_factor(name, low, expected) * spread, FLOORS[dtype])
        rows.append(_row(name, candidate.get(name), expected, tolerance, letters))
    extra = [name for name in candidate if name.startswith("gradient.") and name not in high]
    rows += [_row(name, None, candidate[name], FLOORS[dtype], letters) for name in extra]
    return rows


def _factor(name: str, low: Sequence[Tensors], expected: Tensor) -> float:
    """k: 1.5, and what chance makes of it for a tensor with few effective elements, by the judge's rule."""
    errors = [(run[name].double() - expected.double()).square() for run in low if name in run]
    return luck(effective_count(torch.stack(errors).mean(0))) if errors and expected.numel() else FACTOR


def relative_rms(actual: Tensor | None, expected: Tensor) -> float:
    """RMS of the difference over the RMS of the expected tensor; infinite where one is missing or not finite."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected.double()).square().mean().sqrt().item()
    scale = expected.double().square().mean().sqrt().item()
    if not difference < float("inf"):  # NaN too
        return float("inf")
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return float(difference / scale)


def choices_differ(candidate: Tensors, high: Tensors) -> int:
    """Tokens that went to other experts than in the reference: near-ties that rounding decided."""
    names = [name for name, value in high.items() if not value.is_floating_point() and name in candidate]
    return sum(int((candidate[n] != high[n]).any(-1).sum()) for n in names if candidate[n].shape == high[n].shape)


def _row(name: str, actual: Tensor | None, expected: Tensor, tolerance: float, letters: Sequence[str]) -> LayerError:
    kind, _, path = name.partition(".")
    layer = _layer(path)
    error = min(relative_rms(actual, expected), INFINITE)
    p50 = p99 = maximum = error
    if actual is not None and actual.shape == expected.shape and expected.numel() and 0 < error < INFINITE:
        scale = expected.double().square().mean().sqrt()
        elements = ((actual.double() - expected.double()).abs() / scale).flatten()
        quantiles = torch.quantile(_thinned(elements), torch.tensor([0.5, 0.99], dtype=torch.float64))
        p50, p99, maximum = quantiles[0].item(), quantiles[1].item(), elements.max().item()
    return LayerError(
        name=path,
        kind=kind,
        layer=layer,
        block=letters[layer] if layer is not None and layer < len(letters) else "",
        p50=p50,
        p99=p99,
        maximum=maximum,
        rms=error,
        tolerance=tolerance,
        share=error / tolerance,
    )


def _layer(path: str) -> int | None:
    found = re.search(r"\.(\d+)(\.|$)", path)
    return int(found.group(1)) if found else None


def _thinned(elements: Tensor, most: int = 1 << 20) -> Tensor:
    """Every n-th element where there are too many to sort."""
    return elements[:: max(1, -(-elements.numel() // most))]
