"""Are two loss curves the same, up to rounding?

Rounding differences grow along a training run. How fast is the model's own property, so it is measured: the reference
runs several times in the candidate's precision with weights that differ by less than one unit in the last place, and
once in the higher precision. What these runs differ by is what rounding can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernel_templates.tolerance import FACTOR

LOSS_RESOLUTION = 2.0**-23
"""Relative spacing of float32, in which every run reports its loss."""


def band(runs: Sequence[Sequence[float]], floor: float) -> list[float]:
    """Half-width of the band at each step.

    The largest difference between any two runs so far, times the tolerance factor 1.5; at least ``floor`` x loss.
    """
    widths = []
    widest = 0.0
    for values in zip(*runs, strict=True):
        widest = max(widest, max(values) - min(values))
        widths.append(max(FACTOR * widest, floor * abs(values[0])))
    return widths


def inside(candidate: Sequence[float], reference: Sequence[float], widths: Sequence[float]) -> bool:
    """Whether every point of the candidate lies in the band around the reference."""
    return all(abs(c - r) <= w for c, r, w in zip(candidate, reference, widths, strict=True))


def p_value(candidate: Sequence[float], runs: Sequence[Sequence[float]]) -> float:
    """Two-sided test of "the candidate's mean loss is that of one more reference run".

    The points of one curve are not independent, so the sample is the runs, not the steps: with n runs whose mean
    losses have mean m and deviation s, (mean of the candidate - m) / (s sqrt(1 + 1/n)) follows Student's t with
    n - 1 degrees of freedom (prediction interval of one further observation). s is at least one unit in the last
    place of a float32 loss, below which runs cannot be told apart.

    Raises:
        ValueError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ValueError("the spread of the reference needs two runs")
    n = len(runs)
    means = [math.fsum(run) / len(run) for run in runs]
    centre = math.fsum(means) / n
    deviation = math.sqrt(math.fsum((m - centre) ** 2 for m in means) / (n - 1))
    deviation = max(deviation, LOSS_RESOLUTION * abs(centre))
    distance = abs(math.fsum(candidate) / len(candidate) - centre)
    if distance == 0.0:
        return 1.0
    return student_two_sided(distance / (deviation * math.sqrt(1 + 1 / n)), n - 1)


def student_two_sided(t: float, freedom: int) -> float:
    """P(|T| > t) for Student's t with whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    term, total = (cosine, cosine) if freedom % 2 else (1.0, 1.0)
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if freedom == 1:
        within = 2 * theta / math.pi
    elif freedom % 2:
        within = 2 / math.pi * (theta + sine * total)
    else:
        within = sine * total
    return max(0.0, 1.0 - within)
