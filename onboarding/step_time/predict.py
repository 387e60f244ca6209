"""Step times of settings that nobody has run: the stored fit, and its errors where it was checked. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from onboarding.step_time.fit import SCALES, Fitted
from onboarding.step_time.law import NAMES, Table, parts
from onboarding.step_time.published import Run, published
from onboarding.step_time.terms import Setting

FILE = "fitted.json"
STACK = "onboard"
"""Ours: no published run is of it, so it gets no stack's correction."""
COMMUNICATION = ("all-to-all", "tensor and context parallelism", "weights and gradients")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step."""

    seconds: float
    parts: dict[str, float]
    """Seconds by what they are spent on; they sum up to the step."""


@lru_cache(maxsize=1)
def stored() -> dict[str, Any]:
    """The stored fit: ``parameters``, ``effects``, ``errors`` by protocol."""
    data: dict[str, Any] = json.loads(files("onboarding.step_time").joinpath(FILE).read_text())
    return data


@lru_cache(maxsize=1)
def fitted() -> Fitted:
    """The stored fit, able to predict."""
    data = stored()
    return Fitted(
        runs=published(),
        logs=np.log([data["parameters"][name] for name in NAMES]),
        scales=np.log([data["effects"][name] for name in SCALES]),
    )


def predict(settings: Sequence[Setting], *, trial: float = 1.0) -> list[Prediction]:
    """Step times under our runtime.

    Args:
        settings: all of them are predicted together, which costs little more than one.
        trial: measured over predicted time of a trial run on one device; scales what runs on the device, not what
            goes over links.
    """
    fit = fitted()
    runs = [_as_run(setting) for setting in settings]
    factors = fit.corrections(runs)
    seconds = parts(Table(settings, [False] * len(settings)), fit.logs)
    found = []
    for index, factor in enumerate(factors):
        named = {
            name: float(values[index] * factor) * (1.0 if name in COMMUNICATION else trial)
            for name, values in seconds.items()
        }
        found.append(Prediction(seconds=sum(named.values()), parts=named))
    return found


def _as_run(setting: Setting) -> Run:
    task = "lora" if setting.adapters else "pretrain"
    return Run(setting=setting, source="", stack=STACK, release="0", task=task, mode="base", tokens_per_second=1.0)
