"""Published training speeds with a full layout, as package data. Free of torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import get_args

from onboarding.step_time.hardware import SYSTEMS, Precision
from onboarding.step_time.models import WORKS
from onboarding.step_time.terms import Setting

FILE = "published.csv"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of a published table."""

    setting: Setting
    source: str
    """Page and commit."""
    stack: str
    release: str
    task: str
    mode: str
    """What the page says beside the layout (compiled, overlapped, tokens dropped ...); ``base`` where nothing."""
    tokens_per_second: float
    """A device."""

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.setting.tokens / self.tokens_per_second

    @property
    def layout(self) -> tuple[int, ...]:
        """What makes two layouts different."""
        s = self.setting
        return (s.gpus, s.gbs, s.mbs, s.seq, s.fsdp, s.tp, s.pp, s.cp, s.vp, s.ep)

    @property
    def major(self) -> str:
        """The release without its patch level."""
        return ".".join(self.release.split(".")[:2])


@lru_cache(maxsize=1)
def published() -> tuple[Run, ...]:
    """Every row whose model's sizes are known here."""
    text = files("onboarding.step_time").joinpath(FILE).read_text()
    return tuple(_run(row) for row in csv.DictReader(text.splitlines()) if row["model"] in WORKS)


def _run(row: dict[str, str]) -> Run:
    precision: Precision = next(p for p in get_args(Precision) if p == row["precision"])
    sizes = {n: int(row[n]) for n in ("gpus", "gbs", "mbs", "seq", "fsdp", "tp", "pp", "cp", "vp", "ep")}
    return Run(
        setting=Setting(
            work=WORKS[row["model"]],
            system=SYSTEMS[row["system"]],
            precision=precision,
            adapters=row["task"] == "lora",
            recompute="fullac" in row["mode"],
            **sizes,
        ),
        source=row["source"],
        stack=row["stack"],
        release=row["release"],
        task=row["task"],
        mode=row["mode"],
        tokens_per_second=float(row["tokens_per_second_gpu"]),
    )
