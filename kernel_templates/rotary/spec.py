"""Spec of rotary position embedding of queries and keys, after the norm of their heads. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

PAIRS = ("half", "interleaved")
ANGLES = ("channel", "pair", "half")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """Every pair (a, b) of the first R channels of a head is turned: a cos - b sin, b cos + a sin; the rest passes.

    cos and sin come as they are, with whatever scaling is in them. Source: Su et al., "RoFormer" (2021), equation 34.
    """

    family: ClassVar[str] = "rotary"
    heads: int = dim()
    key_heads: int = dim()
    head_dim: int = dim()
    rotary_dim: int = dim()
    """R: how many channels turn, the size of the last dim of cos and sin (twice that for ``half``)."""
    keys: bool = True
    """There are keys beside the queries."""
    pairs: str = "half"
    """``half``: channels i and i + R / 2; ``interleaved``: 2 i and 2 i + 1."""
    regrouped: bool = False
    """Interleaved pairs come out as halves (DeepSeek's convention)."""
    angles: str = "channel"
    """``channel``: every channel has its own cos and sin; ``pair``: those of pair i stand at i; ``half``: the
    same, and cos and sin hold nothing else (gpt-oss)."""
    temporal: int = 0
    """Multimodal: cos and sin [3, ...] have an axis for time, height and width, and this many pairs take time's."""
    height: int = 0
    """The next pairs take height's, the rest width's."""
    norm: bool = False
    """Heads are divided by their RMS and scaled by a weight before."""
    eps: float = 1e-6
    offset: bool = False
    """That scale is ``1 + w``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs not in PAIRS or self.angles not in ANGLES:
            raise ValueError(f"pairs is one of {', '.join(PAIRS)} and angles of {', '.join(ANGLES)}")
        if min(self.heads, self.key_heads, self.head_dim) < 1:
            raise ValueError("sizes must be positive")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, from 2 to the head's {self.head_dim}, not {self.rotary_dim}")
        if self.temporal and self.angles == "half":
            raise ValueError("multimodal tables must be whole")
        if self.regrouped and self.pairs != "interleaved":
            raise ValueError("only interleaved pairs are regrouped")
        if min(self.temporal, self.height) < 0 or 2 * (self.temporal + self.height) >= self.rotary_dim:
            raise ValueError(f"multimodal sections must leave pairs of {self.rotary_dim // 2} to the width")
        if self.offset and not self.norm:
            raise ValueError("an offset needs a norm")

    def inputs(self) -> tuple[TensorRole, ...]:
        """q [B, T, H, D], k [B, T, HK, D], cos and sin [(3,) 1 or B, T, R or R / 2], q_weight and k_weight [D]."""
        names = ["q", *(["k"] if self.keys else [])]
        roles = [TensorRole(name=n) for n in names] + [TensorRole(name=n, differentiable=False) for n in ("cos", "sin")]
        return (*roles, *(TensorRole(name=f"{n}_weight") for n in names if self.norm))

    def outputs(self) -> tuple[TensorRole, ...]:
        """q_out and k_out, as q and k."""
        return tuple(TensorRole(name=f"{n}_out") for n in (("q", "k") if self.keys else ("q",)))

    def _channels(self) -> int:
        return (self.heads + (self.key_heads if self.keys else 0)) * self.head_dim

    def flops(self, tokens: int, backward: bool = False) -> float:
        """Three operations a channel, with a norm four more forward and eight backward."""
        return float(tokens * self._channels() * (3 + self.norm * (8 if backward else 4)))

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Heads read and written once; cos and sin read; the norm's backward reads the heads again."""
        passes = 3 if backward and self.norm else 2
        return float(tokens * (self._channels() * passes + 2 * self.rotary_dim)) * DTYPE_BYTES[self.dtype]

    def words(self) -> str:
        """E.g. ``rotary 128 of 128, 32 + 8 heads, half, bfloat16``."""
        heads = f"{self.heads} + {self.key_heads} heads" if self.keys else f"{self.heads} heads"
        parts = [f"rotary {self.rotary_dim} of {self.head_dim}, {heads}", self.pairs]
        if self.regrouped:
            parts.append("regrouped")
        if self.angles != "channel":
            parts.append("angles by pair" if self.angles == "pair" else "half a table")
        if self.temporal:
            parts.append(f"sections {self.temporal}, {self.height}")
        if self.norm:
            parts.append("after a head norm" + (" with 1 + w" if self.offset else ""))
        return ", ".join([*parts, self.dtype])
