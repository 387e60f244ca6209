"""Spec of the coefficients and the collapse of (manifold-constrained) hyper-connections. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

MOST_STREAMS = 8


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """n residual streams x [..., n, C] -> the block's input h [..., C], and how its output goes back into the streams.

    u = vec(x) rsqrt(mean(vec(x)^2) + eps);  a = u fn^T, cut into n (pre), n (post) and n^2 (comb) columns, each part
    times its scale, plus base.
    pre = sigmoid(a) + floor;  h = sum_i pre_i x_i;  post = post_factor sigmoid(a) + post_floor;
    comb = Sinkhorn(softmax(a, over columns) + floor): rows and columns divided in turn by their sums + floor.

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (2026), section 4; Sinkhorn and Knopp (1967).
    """

    family: ClassVar[str] = "hyper_connection"
    hidden: int = dim()
    streams: int = 4
    """n, 1 to 8."""
    eps: float = 1e-6
    """Of the norm over all streams."""
    floor: float = 1e-6
    """Added to pre and, in comb, to the softmax and every sum."""
    post: bool = True
    """There are post coefficients [..., n]."""
    post_factor: float = 2.0
    post_floor: float = 0.0
    rounds: int = 20
    """Sinkhorn rounds of comb [..., n, n]: columns once, then rows and columns rounds - 1 times; 0 means no comb."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.streams <= MOST_STREAMS:
            raise ValueError(f"streams must be 1 to {MOST_STREAMS}, not {self.streams}")
        if self.hidden < 1:
            raise ValueError(f"hidden must be positive, not {self.hidden}")
        if self.rounds < 0:
            raise ValueError(f"rounds must not be negative, not {self.rounds}")
        if self.rounds and not self.post:
            raise ValueError("comb comes with post")

    @property
    def columns(self) -> int:
        """Rows of fn: n for pre, n for post, n^2 for comb."""
        return self.streams * (1 + self.post + (self.streams if self.rounds else 0))

    @property
    def parts(self) -> int:
        """Scales: one for each of pre, post and comb that there is."""
        return 1 + self.post + (self.rounds > 0)

    def inputs(self) -> tuple[TensorRole, ...]:
        """x [..., n, C], fn [M, n C], base [M], scale [parts]."""
        return tuple(TensorRole(name=name) for name in ("x", "fn", "base", "scale"))

    def outputs(self) -> tuple[TensorRole, ...]:
        """h [..., C] in x's dtype; post [..., n] and comb [..., n, n] in fp32 where the flags ask for them."""
        names = ["h", *(["post"] if self.post else []), *(["comb"] if self.rounds else [])]
        return tuple(TensorRole(name=name) for name in names)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """The skinny product and the collapse; backward has two products, dx and dfn."""
        size = self.streams * self.hidden
        forward = 2.0 * size * self.columns + 4.0 * size
        return tokens * forward * (2.5 if backward else 1.0)

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Forward reads x and writes h; backward reads x and dh and writes dx. fn is counted once."""
        n = self.streams
        per_token = (2 * n + 1 if backward else n + 1) * self.hidden * DTYPE_BYTES[self.dtype] + 4 * self.columns
        return float(tokens * per_token + n * self.hidden * self.columns * DTYPE_BYTES[self.dtype])

    def words(self) -> str:
        """E.g. ``hyper-connection, 4 streams of 4096, 20 Sinkhorn rounds, bf16``."""
        parts = [f"hyper-connection, {self.streams} streams of {self.hidden}"]
        if self.rounds:
            parts.append(f"{self.rounds} Sinkhorn rounds")
        elif not self.post:
            parts.append("collapse only")
        return ", ".join([*parts, self.dtype])
