"""How wrong the model is on published runs that it was not fitted on.

Every protocol holds out whole groups, fits anew on the rest from the priors, and judges only runs for which the rest
still has what the protocol supposes to be known (a known stack; for another layout the same model and system too). A
layout is held out on a system in all releases and precisions at once, since the same layout a release later would give
the answer away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onboarding.step_time.fit import fit
from onboarding.step_time.published import Run

Key = Callable[[Run], str]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is held out, and what must be left."""

    name: str
    words: str
    held: Key
    known: tuple[Key, ...]
    """A run is judged if one of the rest agrees with it in all of these."""
    limits: dict[str, float]
    """What is wanted: quantile -> error."""


def _stack(r: Run) -> str:
    return r.stack


def _release(r: Run) -> str:
    return f"{r.stack} {r.major} {r.mode}"


def _model(r: Run) -> str:
    return r.setting.work.name


def _system(r: Run) -> str:
    return r.setting.system.key


def _layout(r: Run) -> str:
    return f"{_model(r)} {_system(r)} {r.layout}"


PROTOCOLS = (
    Protocol(
        name="another layout",
        words="the same stack (release and mode), model and system in a layout that was not fitted on",
        held=_layout,
        known=(_release, _model, _system),
        limits={"median": 0.05, "worst": 0.10},
    ),
    Protocol(
        name="another layout and release",
        words="the same stack in any release and mode, model and system in a layout that was not fitted on",
        held=_layout,
        known=(_stack, _model, _system),
        limits={},
    ),
    Protocol(
        name="unseen model",
        words="a model of which no run was fitted on",
        held=_model,
        known=(_stack,),
        limits={"median": 0.08, "p90": 0.20},
    ),
    Protocol(
        name="unseen system",
        words="a system of which no run was fitted on",
        held=_system,
        known=(_stack,),
        limits={"median": 0.08, "p90": 0.20},
    ),
    Protocol(name="unseen stack", words="a runtime of which no run was fitted on", held=_stack, known=(), limits={}),
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One held-out run."""

    run: Run
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.predicted_s / self.run.step_s - 1


def judge(runs: Sequence[Run], protocol: Protocol, note: Callable[[str], None] = lambda held: None) -> list[Judged]:
    """Predict every run that the protocol can judge, each by a fit without its group."""
    judged: list[Judged] = []
    for group in sorted({protocol.held(run) for run in runs}):
        rest = [run for run in runs if protocol.held(run) != group]
        known = {tuple(key(run) for key in protocol.known) for run in rest}
        held = [run for run in runs if protocol.held(run) == group]
        held = [run for run in held if tuple(key(run) for key in protocol.known) in known]
        if not held:
            continue
        note(group)
        seconds = fit(rest).seconds(held)
        judged += [Judged(run=run, predicted_s=float(s)) for run, s in zip(held, seconds, strict=True)]
    return judged


def summary(judged: Iterable[Judged]) -> dict[str, Any]:
    """Median, 90th percentile and worst absolute error, and the rank correlation of tokens a second."""
    rows = list(judged)
    errors = np.abs([row.error for row in rows])
    seen = [row.run.tokens_per_second for row in rows]
    told = [row.run.setting.tokens / row.predicted_s for row in rows]
    return {
        "runs": len(rows),
        "median": float(np.median(errors)),
        "p90": float(np.quantile(errors, 0.9)),
        "worst": float(errors.max()),
        "rank": rank_correlation(seen, told),
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's, ties by their mean rank; None below three values."""
    if len(one) < 3:
        return None
    a, b = _ranks(one), _ranks(other)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _ranks(values: Sequence[float]) -> Any:
    given = np.asarray(values)
    return np.array([((given < v).sum() + (given <= v).sum() - 1) / 2 for v in given])


def by_group(judged: Iterable[Judged], key: Key) -> dict[str, dict[str, Any]]:
    """The summary of each group."""
    rows = list(judged)
    return {name: summary(row for row in rows if key(row.run) == name) for name in sorted({key(r.run) for r in rows})}


GROUPS: dict[str, Key] = {
    "model": _model,
    "system": _system,
    "stack": _stack,
    "precision": lambda r: r.setting.precision,
}
