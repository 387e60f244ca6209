"""The time of one step from its terms, and the few physical parameters that turn published rates into real ones.

    busy  = linear / e + experts / e' + attention / a + scans / s
            + vector + routed rows + logits + exchange + tensor + context
    step  = soft maximum(busy, launches) (1 + b bubble) + waits for weights + optimizer

A matrix product reaches ``e = sustained (power share)^alpha / (1 + c ridge / size)``: at small sizes it is bound by the
bytes of its operands and results, and the larger the peak against the memory's rate (the ridge), the sooner. Sizes are
the hidden width, split by tensor parallelism; for an expert the harmonic sum of its two widths and its rows, so fewer
tokens an expert cost more (this is where routing enters, besides the load of the busiest rank and the exchange).

Parameters are positive, so they are handled as logarithms; each has a prior (a median and a spread).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onboarding.step_time.terms import Setting, Terms, terms

Array = NDArray[np.float64]
SHARPNESS = 4
"""Of the soft maximum of computing and launching."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed of a parameter before any run is seen."""

    median: float
    spread: float
    """Standard deviation of the logarithm."""
    words: str


EFFICIENCIES = ("hopper:bf16", "hopper:fp8", "blackwell:bf16", "blackwell:fp8", "blackwell:mxfp8", "blackwell:nvfp4")
SYSTEM_SPREAD = {"H100": 0.02, "H200": 0.1, "B200": 0.1, "GB200": 0.1, "B300": 0.15, "GB300": 0.15}
_SHARES = dict(zip(EFFICIENCIES, (0.65, 0.5, 0.65, 0.55, 0.5, 0.35), strict=True))
PRIORS: dict[str, Prior] = {
    **{f"products {k}": Prior(median=m, spread=0.25, words="share of the peak") for k, m in _SHARES.items()},
    "attention hopper": Prior(median=0.45, spread=0.3, words="share of the bf16 peak at large head dims"),
    "attention blackwell": Prior(median=0.4, spread=0.3, words="share of the bf16 peak at large head dims"),
    "scans": Prior(median=0.05, spread=1.0, words="share of the bf16 peak that recurrences reach"),
    "head dim": Prior(median=30, spread=0.7, words="at which attention reaches half of that"),
    "product size": Prior(median=1.0, spread=0.6, words="c of shared products"),
    "expert size": Prior(median=1.0, spread=0.6, words="c of experts' products"),
    "power": Prior(median=0.5, spread=0.6, words="exponent of watts a peak FLOP/s"),
    **{
        f"system {k}": Prior(median=1.0, spread=s, words="what its data sheet does not say")
        for k, s in SYSTEM_SPREAD.items()
    },
    "vector": Prior(median=4, spread=0.4, words="passes over every number that products write"),
    "routed vector": Prior(median=4, spread=0.5, words="the same for routed rows"),
    "logits": Prior(median=12, spread=0.5, words="passes over the logits"),
    "launch": Prior(median=6e-4, spread=0.7, words="s of host time a layer and micro-batch"),
    "routed launch": Prior(median=2e-3, spread=0.7, words="the same of a routed layer, with its waits for counts"),
    "captured launch": Prior(median=3e-4, spread=1.0, words="the same where the stack replays graphs"),
    "exchange inside": Prior(median=0.7, spread=0.6, words="exposed all-to-all over its time at link rate"),
    "exchange between": Prior(median=0.7, spread=0.6, words="the same between domains, at NIC rate"),
    "tensor": Prior(median=0.7, spread=0.4, words="exposed tensor-parallel traffic"),
    "context": Prior(median=0.5, spread=0.6, words="exposed context-parallel traffic"),
    "weights": Prior(median=0.3, spread=0.8, words="exposed sums of gradients, weights whole"),
    "sharded weights": Prior(median=0.3, spread=0.8, words="exposed gathers and sums, weights sharded"),
    "bubble": Prior(median=0.9, spread=0.3, words="of the idle share that the schedule says"),
}
"""By name; 34 numbers, most of them far better known than the spread says."""
NAMES = tuple(PRIORS)
MEDIANS: Array = np.log([PRIORS[name].median for name in NAMES])
SPREADS: Array = np.array([PRIORS[name].spread for name in NAMES])
WATTS = {"A100": 400, "H100": 700, "H200": 700, "B200": 1000, "B300": 1100, "GB200": 1200, "GB300": 1400, "MI300X": 750}
BLACKWELL = frozenset({"B200", "B300", "GB200", "GB300"})


class Table:
    """Many settings as arrays.

    Args:
        settings: in any order.
        captured: for each whether its stack replays graphs of routed layers.
    """

    def __init__(self, settings: Sequence[Setting], captured: Sequence[bool]) -> None:
        self.settings = list(settings)
        rows = [terms(s) for s in settings]
        self.terms = {f.name: np.array([getattr(row, f.name) for row in rows]) for f in fields(Terms)}
        self.captured = np.array(captured, dtype=bool)
        blackwell = [s.system.key in BLACKWELL for s in settings]
        self.blackwell = np.array(blackwell)
        self.efficiency = [_efficiency(s, b) for s, b in zip(settings, blackwell, strict=True)]
        self.system = [f"system {s.system.key}" for s in settings]
        # relative to the generation's first machine, so that the exponent does not move the efficiencies
        self.watts = np.array([_watts(s, b) for s, b in zip(settings, blackwell, strict=True)])
        self.ridge = np.array([s.system.peak(s.precision) / (s.system.memory * 1e12) for s in settings])
        self.hidden = np.array([s.work.hidden / math.sqrt(s.tp) for s in settings])
        self.inside = np.array([max(s.work.expert_width_in, 1) for s in settings])
        self.width = np.array([max(s.work.expert_width, 1) for s in settings])
        self.rows = np.array([s.rows_per_expert for s in settings])
        self.head = np.array([s.work.head_dim for s in settings])
        self.sharded = np.array([s.fsdp > 1 for s in settings])

    def take(self, index: Array | Sequence[int]) -> Table:
        """Some of the settings."""
        return Table([self.settings[int(i)] for i in index], [bool(self.captured[int(i)]) for i in index])


def parts(table: Table, logs: Array) -> dict[str, Array]:
    """Seconds of each part of a step; they sum up to the step.

    Args:
        table: settings.
        logs: logarithms of the parameters, in the order of ``NAMES``.
    """
    p = dict(zip(NAMES, np.exp(logs), strict=True))
    x = table.terms
    own = _own(p, table.system) * table.watts ** p["power"]
    sustained = np.array([p[f"products {k}"] for k in table.efficiency]) * own
    linear = x["linear"] * (1 + p["product size"] * table.ridge / table.hidden) / sustained
    small = 1 / table.inside + 1 / table.width + 1 / np.maximum(table.rows, 1)
    experts = x["experts"] * (1 + p["expert size"] * table.ridge * small) / sustained
    share = np.where(table.blackwell, p["attention blackwell"], p["attention hopper"]) * own
    attention = x["attention"] * (table.head + p["head dim"]) / table.head / share
    sums = {
        "shared matrix products": linear,
        "experts": experts,
        "attention": attention,
        "recurrences": x["scans"] / (p["scans"] * own),
        "elementwise": p["vector"] * x["vector"] + p["logits"] * x["logits"],
        "rows to experts and back": p["routed vector"] * x["routed_vector"],
        "all-to-all": p["exchange inside"] * x["exchange_inside"] + p["exchange between"] * x["exchange_between"],
        "tensor and context parallelism": p["tensor"] * x["tensor"] + p["context"] * x["context"],
    }
    busy = sum(sums.values(), np.zeros(len(table.settings)))
    host = p["launch"] * x["launches"]
    host = host + np.where(table.captured, p["captured launch"], p["routed launch"]) * x["routed_launches"]
    working = (busy**SHARPNESS + host**SHARPNESS) ** (1 / SHARPNESS)
    exposed = np.where(table.sharded, p["sharded weights"], p["weights"])
    return {
        **sums,
        "waiting for launches": working - busy,
        "pipeline bubble": working * p["bubble"] * x["bubble"],
        "weights and gradients": exposed * (x["weights_inside"] + x["weights_between"]),
        "optimizer": x["optimizer"],
    }


def log_seconds(table: Table, logs: Array) -> Array:
    """Logarithm of the step's seconds."""
    result: Array = np.log(sum(parts(table, logs).values()))
    return result


def _own(p: Mapping[str, float], systems: Sequence[str]) -> Array:
    return np.array([p.get(system, 1.0) for system in systems])


def _efficiency(s: Setting, blackwell: bool) -> str:
    """Systems of other makers count as Hopper: nothing published here tells better."""
    if not blackwell:
        return "hopper:bf16" if s.precision == "bf16" else "hopper:fp8"
    return f"blackwell:{s.precision}"


def _watts(s: Setting, blackwell: bool) -> float:
    first = WATTS["B200"] / 2250 if blackwell else WATTS["H100"] / 989
    return WATTS[s.system.key] / s.system.bf16 / first


def plain(logs: Array) -> dict[str, Any]:
    """The parameters by name, for people and for JSON."""
    return {name: float(f"{value:.5g}") for name, value in zip(NAMES, np.exp(logs), strict=True)}
