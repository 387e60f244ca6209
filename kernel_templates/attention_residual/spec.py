"""Spec of attention residuals: a layer's input as an average of earlier blocks' outputs. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

MOST_SOURCES = 128


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """h = sum_i softmax_i(scale <v_i rsqrt(mean(v_i^2) + eps), query>) v_i over L sources, for each token.

    A norm's weight is folded into the query. Source: Kimi team, "Attention residuals" (2026): softmax over depth with
    one learned query a layer and RMS-normalised keys.
    """

    family: ClassVar[str] = "attention_residual"
    hidden: int = dim()
    sources: int = 9
    """How many tensors are averaged. They are separate inputs: nothing is stacked."""
    eps: float = 1e-6
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1:
            raise ValueError(f"hidden must be positive, not {self.hidden}")
        if not 2 <= self.sources <= MOST_SOURCES:
            raise ValueError(
                f"sources must be from 2 to {MOST_SOURCES}, not {self.sources}: one source is passed on as it is"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be positive and finite, not {self.scale}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """query [D], then v0, v1, ... [..., D]."""
        return (TensorRole(name="query"), *(TensorRole(name=f"v{i}") for i in range(self.sources)))

    def outputs(self) -> tuple[TensorRole, ...]:
        """h [..., D] in the dtype of v0."""
        return (TensorRole(name="h"),)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """About 6 operations an element of a source forward, 9 backward."""
        return float(tokens * self.hidden * self.sources * (9 if backward else 6))

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Forward reads the sources and writes h; backward reads them and dh, and writes their gradients."""
        passes = 2 * self.sources + 1 if backward else self.sources + 1
        return float(tokens * self.hidden * passes * DTYPE_BYTES[self.dtype] + self.hidden * 4)

    def words(self) -> str:
        """E.g. ``attention residual, 9 sources of 7168, bfloat16``."""
        parts = [f"attention residual, {self.sources} sources of {self.hidden}"]
        if self.scale != 1.0:
            parts.append(f"scale {self.scale:g}")
        return ", ".join([*parts, self.dtype])
