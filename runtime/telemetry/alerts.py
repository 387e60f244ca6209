"""Rules over the last steps, each with its own window and consequence."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.config import AlertRule

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule that fired."""

    rule: str
    step: int
    words: str
    stop: bool


class Alerts:
    """Judges every record; a rule speaks again only after it has been quiet for a step."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = rules
        longest = max((r.window for r in rules), default=1)
        self._records: deque[Mapping[str, Any]] = deque(maxlen=longest + 1)
        self._speaking: set[int] = set()

    def judge(self, record: Mapping[str, Any]) -> list[Alert]:
        """Alerts that this step's record raises.

        Args:
            record: with ``step``, ``loss``, ``grad_norm``, ``seconds``, ``tokens_per_second``, ``device_bytes`` and,
                for models with experts, ``experts/imbalance``.
        """
        self._records.append(record)
        fired = []
        for number, rule in enumerate(self._rules):
            words = _RULES[rule.rule](list(self._records)[-(rule.window + 1) :], rule)
            if words and number not in self._speaking:
                step = int(record["step"])
                fired.append(Alert(rule=rule.rule, step=step, words=words, stop=rule.action == "stop"))
            if words:
                self._speaking.add(number)
            else:
                self._speaking.discard(number)
        return fired


Window = Sequence[Mapping[str, Any]]


def _nan(window: Window, rule: AlertRule) -> str:
    bad = [n for n in ("loss", "grad_norm") if not math.isfinite(window[-1].get(n, 0.0))]
    return f"{' and '.join(bad)} not finite" if bad else ""


def _stall(window: Window, rule: AlertRule) -> str:
    seconds = window[-1]["seconds"]
    return f"the step took {seconds:.1f} s, more than {rule.limit:g} s" if seconds > rule.limit else ""


def _throughput_drop(window: Window, rule: AlertRule) -> str:
    before = [r["tokens_per_second"] for r in window[:-1]]
    if len(before) < min(rule.window, 3):
        return ""
    median, now = statistics.median(before), window[-1]["tokens_per_second"]
    drop = 1 - now / median if median else 0.0
    return f"{now:.0f} tokens/s, {drop:.0%} below the median of {len(before)} steps" if drop > rule.limit else ""


def _imbalance(window: Window, rule: AlertRule) -> str:
    value = window[-1].get("experts", {}).get("imbalance", 0.0)
    return f"the busiest expert has {value:.2f} x the mean load" if value > rule.limit else ""


def _memory_slope(window: Window, rule: AlertRule) -> str:
    """Least squares over a full window."""
    if len(window) <= rule.window:
        return ""
    values = [r["device_bytes"] / MIB for r in window]
    middle, mean = (len(values) - 1) / 2, statistics.fmean(values)
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values))
    slope /= sum((i - middle) ** 2 for i in range(len(values)))
    return f"memory grows by {slope:.2f} MiB a step over {rule.window} steps" if slope > rule.limit else ""


_RULES = {
    "nan": _nan,
    "stall": _stall,
    "throughput-drop": _throughput_drop,
    "imbalance": _imbalance,
    "memory-slope": _memory_slope,
}
