"""What is adapted. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ROLES = {
    "qkv": "projections into attention (queries, keys, values, and their low-rank halves)",
    "attention": "every projection of attention and of linear attention, in and out",
    "mlp": "dense and shared feed-forward layers",
    "gmm": "routed experts",
    "linear": "every linear layer of the blocks; routers, embedding and head excluded",
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """W + (alpha / r) B A with trained A [r, in] and B [out, r]; for experts one pair each."""

    r: int = 16
    """Rank."""
    alpha: float = 32.0
    """Scale of the update, divided by the rank."""
    dropout: float = 0.0
    """On the input of linear adapters. Experts have none: PEFT knows no such adapter."""
    targets: tuple[str, ...] = ("attention", "gmm")
    """Roles (keys of ``ROLES``) or module names, matched as PEFT does: the whole name, or its end after a dot.
    An expert weight is named with its module: ``experts.down_proj``."""
    experts: Literal["grouped", "merged"] = "grouped"
    """How adapted experts compute: ``grouped`` low-rank products, or ``merged`` weights formed on the fly (slower,
    but bit for bit what PEFT does, and any expert kernel can use them)."""
    seed: int = 0
    """Initial A is a function of this and the parameter's name: equal on every rank and in every layout."""

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"r must be at least 1, not {self.r}")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha is {self.alpha}: it must be above zero and finite")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")
        if not self.targets:
            raise ValueError(f"targets is empty; name modules, or roles out of {', '.join(ROLES)}")
        if self.experts not in ("grouped", "merged"):
            raise ValueError(f"experts must be grouped or merged, not {self.experts!r}")

    @property
    def scaling(self) -> float:
        return self.alpha / self.r
