"""What an attention mask lets through: a pattern with one number, a choice that depends on the data, or more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onboarding.stages.parse.understand.semantics import pattern

HIDDEN = -1e4
"""Additive mask values below this hide a key."""


@dataclass(frozen=True)
class Mask:
    """A mask, read."""

    kind: str
    """``full``, ``sliding``, ``chunked``, ``bidirectional``, ``chosen``."""
    extent: int | None
    """Window or chunk; for ``chosen`` the largest number of keys of a query."""
    visible: Tensor | None
    """Bool, broadcastable to the scores; None: every key."""
    bias: Tensor | None
    """Finite additive scores, where there are any."""


def read_mask(mask: Tensor | None, queries: int, keys: int) -> Mask:
    """Read an attention mask as an attention function was given it.

    Args:
        mask: additive or bool, broadcastable to [B, H, queries, keys]; None: nothing is hidden.
    """
    if mask is None:
        return Mask("bidirectional", None, None, None)
    mask = mask.detach()[..., :keys]
    if mask.dtype == torch.bool:
        visible, bias = mask, None
    else:
        visible = mask > HIDDEN
        finite = torch.where(visible, mask, torch.zeros_like(mask))
        bias = finite if bool(finite.any()) else None
    kind, extent = _pattern_of(visible, queries, keys)
    return Mask(kind, extent, visible, bias)


def _pattern_of(visible: Tensor, queries: int, keys: int) -> tuple[str, int | None]:
    rows = visible.expand(*visible.shape[:-2], queries, keys)
    if queries == keys:
        first = rows.reshape(-1, queries, keys)[0]
        if bool((rows == first).all()):
            for kind, extent in _guesses(first):
                if bool((first == pattern(kind, queries, extent)).all()):
                    return kind, extent
    return "chosen", int(rows.sum(-1).max())


def _guesses(first: Tensor) -> list[tuple[str, int | None]]:
    """Patterns worth comparing: the window from the last row, the chunk from where key 0 is last seen."""
    window = int(first[-1].sum())
    seen = first[:, 0].nonzero().flatten()
    chunk = int(seen[-1]) + 1 if len(seen) else 1
    return [("full", None), ("sliding", window), ("chunked", chunk), ("bidirectional", None)]


def bias_kind(bias: Tensor, visible: Tensor | None, other: Tensor | None) -> str:
    """``alibi`` (slopes times distance), ``relative`` (depends on the distance alone), ``data``.

    Args:
        bias: [.., H, T, S] of one step.
        other: the same of a step on other tokens; None: unknown.
    """
    if other is not None and (bias.shape != other.shape or not torch.allclose(bias, other, atol=1e-6)):
        return "data"
    seen = visible.expand_as(bias) if visible is not None else torch.ones_like(bias, dtype=torch.bool)
    t, s = bias.shape[-2:]
    distance = (torch.arange(t)[:, None] - torch.arange(s)[None]).expand_as(bias).to(bias.dtype)
    rows = bias.reshape(-1, t, s)
    marks, far = seen.reshape(-1, t, s), distance.reshape(-1, t, s)
    for row, mark, off in zip(rows, marks, far, strict=True):
        # every query may have a constant of its own: softmax does not see it
        centred, apart = _centred(row, mark), _centred(off, mark)
        slope = (centred * apart).sum() / apart.pow(2).sum().clamp_min(1e-9)
        if float((centred - slope * apart).abs().max()) > 1e-4 * max(1.0, float(row[mark].abs().max())):
            return "relative" if other is not None else "data"
    return "alibi"


def _centred(values: Tensor, mark: Tensor) -> Tensor:
    """Rows without their mean over the visible keys; 0 elsewhere."""
    count = mark.sum(-1, keepdim=True).clamp_min(1)
    kept = torch.where(mark, values, torch.zeros_like(values))
    return torch.where(mark, values - kept.sum(-1, keepdim=True) / count, torch.zeros_like(values))
