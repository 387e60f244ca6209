"""Fresh memory of a candidate's process: filled with something else from call to call, so that reading it shows.

A fill that is always the same can be recognised: a kernel that works only where it finds NaN in memory that nobody
wrote is right as long as it is judged. So calls are given NaN, ordinary numbers and very large ones in turn. torch has
a switch for this (``torch.utils.deterministic``), which knows NaN only and tells everybody that something is checked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

KINDS = ("nan", "ordinary", "large")

_kind = KINDS[0]
_generator = torch.Generator()


def turn(number: int) -> None:
    """What is handed out from now on: of the kind for call ``number`` of a case."""
    global _kind
    _kind = KINDS[number % len(KINDS)]


def watch() -> None:
    """Fill what ``torch.empty`` and its kin return from now on. Once a process."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        setattr(owner, name, _filling(getattr(owner, name)))


def _filling(make: Any) -> Any:
    @functools.wraps(make)
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = make(*args, **kwargs)
        return made if made.is_meta or type(made) is not Tensor else fill(made)

    return filled


def fill(t: Tensor) -> Tensor:
    """Overwrite every element; integers and booleans with large, or with small numbers in calls of ordinary ones."""
    with torch.no_grad():
        if _kind == "ordinary":
            noise = torch.randn(min(t.numel(), 1021), generator=_generator)
            if not t.dtype.is_floating_point:
                noise = (noise * 8).abs()
            tile = noise.to(device=t.device, dtype=t.dtype)
            repeats = -(-t.numel() // max(tile.numel(), 1))
            return t.copy_(tile.repeat(repeats)[: t.numel()].reshape(t.shape))
        if t.dtype.is_floating_point or t.dtype.is_complex:
            return t.fill_(float("nan") if _kind == "nan" else torch.finfo(t.dtype).max / 4)
        return t.fill_(True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)
