"""Fits the law to published runs, and corrects it by what like runs have shown.

Two layers. The physical parameters are found by Gauss-Newton on logarithms, under their priors. What remains, the
residual of a run, is a sum of effects that runs have in common: the stack, its release, the model, the system, the
precision, the layout; and two smooth ones, in the layout's sizes and in the model's. Each effect is Gaussian with a
spread of its own (chosen by marginal likelihood), so the whole residual is a Gaussian process: a run in another layout
of a known model gets that model's correction, a new model that of its like. This is also how trial runs correct the
model: they are further runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onboarding.step_time.law import MEDIANS, SPREADS, Array, Table, log_seconds
from onboarding.step_time.published import Run

EFFECTS: dict[str, Callable[[Run], str]] = {
    "stack": lambda r: r.stack,
    "release": lambda r: f"{r.stack} {r.major}",
    "patch": lambda r: f"{r.stack} {r.release}",
    "model": lambda r: r.setting.work.name,
    "system": lambda r: r.setting.system.key,
    "precision": lambda r: f"{r.setting.precision} {r.setting.system.key[0]}",
    "model on system": lambda r: f"{r.setting.work.name} {r.setting.system.key}",
    "model in precision": lambda r: f"{r.setting.work.name} {r.setting.precision}",
    "model in release": lambda r: f"{r.setting.work.name} {r.stack} {r.major}",
    "routed in release": lambda r: f"{r.setting.work.experts > 0} {r.stack} {r.major}",
    "mode": lambda r: f"{r.stack} {r.mode}",
    "layout": lambda r: f"{r.setting.work.name} {r.setting.system.key} {r.layout}",
}
Index = NDArray[np.intp]
SMOOTH = ("like layouts", "like models", "like models on a generation")
NOISE = "noise"
SCALES = (*EFFECTS, *SMOOTH, NOISE)
START: Array = np.log(np.array([0.05] * (len(SCALES) - 1) + [0.03]))
SCALE_SPREAD = 1.0
REACH = 1.5
"""Of the smooth effects, in doublings."""
ROUNDS = 3
STEPS = 15


def captured(run: Run) -> bool:
    """Whether the stack replays graphs of routed layers: its release notes say so from 26.06 on Blackwell; capacity
    factors (``tokendrop``) make sizes constant, so nothing waits for counts either."""
    new = run.stack == "megatron-bridge" and run.major >= "26.06" and "B" in run.setting.system.key
    return new or run.mode == "tokendrop"


class Alike:
    """How much two runs have in common, effect by effect.

    Args:
        runs: all that are trained on and judged.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.kernels: list[Array] = []
        for key in EFFECTS.values():
            _, names = np.unique([key(run) for run in runs], return_inverse=True)
            self.kernels.append((names[:, None] == names[None, :]).astype(np.float64))
        models = _near([_model(run) for run in runs])
        generation = np.array([run.setting.system.key[0] == "H" for run in runs])
        self.kernels += [_near([_layout(run) for run in runs]), models]
        self.kernels.append(models * (generation[:, None] == generation[None, :]))

    def between(self, scales: Array, rows: Index, columns: Index) -> Array:
        """Covariance of residuals without noise."""
        index = np.ix_(rows, columns)
        total: Array = np.zeros((len(rows), len(columns)))
        for log, kernel in zip(scales, self.kernels, strict=False):
            total += np.exp(2 * log) * kernel[index]
        return total


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fit, able to predict further runs."""

    runs: tuple[Run, ...]
    """That it was fitted on."""
    logs: Array
    """Physical parameters."""
    scales: Array
    """Logarithms of the effects' spreads."""

    def corrections(self, runs: Sequence[Run]) -> Array:
        """Factor on the law's time for each run, from what it has in common with the fitted ones."""
        everything = [*self.runs, *runs]
        alike = Alike(everything)
        known, new = np.arange(len(self.runs)), np.arange(len(self.runs), len(everything))
        residual = _observed(self.runs) - log_seconds(_table(self.runs), self.logs)
        weights = np.linalg.solve(_noisy(alike, self.scales, known), residual)
        result: Array = np.exp(alike.between(self.scales, new, known) @ weights)
        return result

    def seconds(self, runs: Sequence[Run]) -> Array:
        """Predicted step times."""
        result: Array = np.exp(log_seconds(_table(runs), self.logs)) * self.corrections(runs)
        return result


def fit(runs: Sequence[Run]) -> Fitted:
    """Fit parameters and spreads, in turns."""
    return _fit(tuple(runs), _table(runs), Alike(runs))


def _fit(runs: tuple[Run, ...], table: Table, alike: Alike) -> Fitted:
    observed, index = _observed(runs), np.arange(len(runs))
    scales, logs = START.copy(), MEDIANS.copy()
    logs = _parameters(table, observed, _noisy(alike, scales, index), logs)
    kernels = [*alike.kernels, np.eye(len(runs))]
    for _ in range(ROUNDS):
        residual = observed - log_seconds(table, logs)
        covariance = _noisy(alike, scales, index)
        best = _evidence(covariance, residual, scales)
        for place in range(len(scales)):
            for change in (0.5, -0.5):
                other = scales.copy()
                other[place] += change
                moved = covariance + (np.exp(2 * other[place]) - np.exp(2 * scales[place])) * kernels[place]
                value = _evidence(moved, residual, other)
                if value < best:
                    best, scales, covariance = value, other, moved
        logs = _parameters(table, observed, _noisy(alike, scales, index), logs)
    return Fitted(runs=runs, logs=logs, scales=scales)


def _parameters(table: Table, observed: Array, covariance: Array, logs: Array) -> Array:
    """Gauss-Newton for the maximum of the posterior."""
    lower = np.linalg.cholesky(covariance)
    for _ in range(STEPS):
        now = log_seconds(table, logs)
        slopes = np.empty((len(observed), len(logs)))
        for place in range(len(logs)):
            moved = logs.copy()
            moved[place] += 1e-4
            slopes[:, place] = (log_seconds(table, moved) - now) / 1e-4
        matrix = np.vstack([np.linalg.solve(lower, slopes), np.diag(1 / SPREADS)])
        aim = np.concatenate([np.linalg.solve(lower, observed - now), (MEDIANS - logs) / SPREADS])
        step = np.clip(np.linalg.lstsq(matrix, aim, rcond=None)[0], -0.5, 0.5)
        logs = logs + step
        if np.abs(step).max() < 1e-3:
            break
    return logs


def _evidence(covariance: Array, residual: Array, scales: Array) -> float:
    """Negative logarithm of the marginal likelihood and of the spreads' prior."""
    lower = np.linalg.cholesky(covariance)
    far = (scales - START) / SCALE_SPREAD
    fits = residual @ np.linalg.solve(covariance, residual)
    return float(0.5 * fits + np.log(np.diag(lower)).sum() + 0.5 * far @ far)


def _noisy(alike: Alike, scales: Array, index: Index) -> Array:
    result: Array = alike.between(scales, index, index) + np.exp(2 * scales[-1]) * np.eye(len(index))
    return result


def _table(runs: Sequence[Run]) -> Table:
    return Table([run.setting for run in runs], [captured(run) for run in runs])


def _observed(runs: Sequence[Run]) -> Array:
    result: Array = np.log(np.array([run.step_s for run in runs]))
    return result


def _near(points: Sequence[Sequence[float]]) -> Array:
    place = np.array(points)
    distance = ((place[:, None] - place[None]) ** 2).sum(-1)
    result: Array = np.exp(-distance / (2 * REACH**2))
    return result


def _layout(run: Run) -> list[float]:
    s = run.setting
    return [float(np.log2(n)) for n in (s.tp, s.pp, s.cp, s.mbs, s.ep, s.vp)]


def _model(run: Run) -> list[float]:
    work = run.setting.work
    sizes = (work.hidden, max(work.forward(4096), 1.0), max(work.expert_width, 512), max(work.top_k, 1))
    kinds = (work.experts > 0, work.scan_flops > 0)
    return [float(np.log2(n)) for n in sizes] + [2.0 * kind for kind in kinds]
