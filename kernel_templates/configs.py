"""Chooses the configuration (tile sizes, warps) of a kernel: by device, then by the nearest shape bucket.

A folder holds one JSON file per device::

    {"device": "nvidia_h200", "rows": [{"bucket": {"hidden": 4096}, "config": {"BLOCK": 4096, "num_warps": 8}}]}

``interpreter.json`` serves CPU tensors. Nothing is tuned at run time: a bucket that no row names takes the nearest
one, an unknown GPU the rows of another, and the choice says so. Self-contained: bundles carry a copy of this file.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INTERPRETER = "interpreter"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tuned configuration."""

    bucket: dict[str, int]
    config: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The configuration for one call, and how it was found."""

    config: dict[str, Any]
    device: str
    """Device whose rows were used."""
    bucket: dict[str, int]
    """The row's bucket."""
    exact: bool
    """The device is the asked one and every size of the row's bucket is met."""
    note: str
    """Empty where exact, else what was taken for what."""


def device_name(device: torch.device) -> str:
    """``interpreter`` for CPU tensors, else the GPU's name as a word, e.g. ``nvidia_h200``."""
    if device.type != "cuda":
        return INTERPRETER
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return "_".join(words)


def load(folder: Path) -> dict[str, list[Row]]:
    """All tables of a folder, by device.

    Raises:
        ValueError: a file is malformed; says which.
    """
    tables: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            rows = [Row(bucket=dict(row["bucket"]), config=dict(row["config"])) for row in data["rows"]]
            device = str(data["device"])
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path.name} is not a table of configurations: {problem!r}") from problem
        if rows:
            tables[device] = rows
    return tables


def distance(asked: dict[str, int], bucket: dict[str, int]) -> float:
    """How far two buckets are: the sum of |log2| ratios over the sizes that the row names.

    A row for smaller sizes counts twice as far: its tiles may not fit the larger ones.
    """
    total = 0.0
    for name, size in bucket.items():
        if name in asked:
            apart = math.log2(max(int(asked[name]), 1) / max(size, 1))
            total += 2.0 * apart if apart > 0 else -apart
    return total


def choose(tables: dict[str, list[Row]], device: str, bucket: dict[str, int]) -> Choice:
    """The nearest row for ``bucket`` on ``device``; ties go to the earlier row.

    Raises:
        LookupError: no table can serve the device.
    """
    used = device
    if device not in tables:
        # tile sizes for the interpreter are no help to a GPU, nor the other way round
        others = sorted(name for name in tables if (name == INTERPRETER) == (device == INTERPRETER))
        # "nvidia_h200" serves "nvidia_h200_nvl" before any other does
        others.sort(key=lambda name: -_common_prefix(name, device))
        if not others:
            raise LookupError(f"no configuration for {device}; there are: {', '.join(sorted(tables)) or 'none'}")
        used = others[0]
    row = min(tables[used], key=lambda r: distance(bucket, r.bucket))
    notes = []
    if used != device:
        notes.append(f"configuration of {used} used on {device}")
    if distance(bucket, row.bucket) > 0:
        notes.append(f"bucket {row.bucket} used for {bucket}")
    return Choice(config=row.config, device=used, bucket=row.bucket, exact=not notes, note="; ".join(notes))


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Chooser:
    """``choose_config`` of :func:`kernel_templates.bind.bind`: chooses once a bucket and device, then remembers."""

    def __init__(self, tables: dict[str, list[Row]], name: str = "") -> None:
        self.tables = tables
        self.name = name
        self.choices: dict[tuple[Any, ...], Choice] = {}
        """What was chosen so far, by device and bucket."""

    @classmethod
    def from_folder(cls, folder: Path, name: str = "") -> Chooser:
        """Read the tables of ``folder`` now."""
        return cls(load(folder), name)

    def choice(self, bucket: dict[str, int], device: torch.device) -> Choice:
        """The choice for a bucket; the first inexact one of each bucket is logged.

        Raises:
            LookupError: no table can serve the device.
        """
        # a bucket always lists its sizes in the same order; int() for the symbolic sizes of a compiler
        key = (device, *[(name, int(size)) for name, size in bucket.items()])
        if key not in self.choices:
            found = choose(self.tables, device_name(device), bucket)
            self.choices[key] = found
            if found.note:
                level = logging.WARNING if found.device != device_name(device) else logging.INFO
                _log.log(level, "%s: %s", self.name or "kernel", found.note)
        return self.choices[key]

    def __call__(self, bucket: dict[str, int], device: torch.device) -> dict[str, Any]:
        """The configuration for a bucket."""
        return self.choice(bucket, device).config
