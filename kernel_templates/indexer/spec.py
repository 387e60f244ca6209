"""Spec of the lightning indexer: scores of keys, the best of them for each query, and its training. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

ACTIVATIONS = ("relu", "none")
OPERATIONS = ("selection", "objective", "compression")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """The K keys with the largest score among those that a query sees, in ascending order, and their scores.

    I[t, s] = D^-1/2 sum_h w[t, h] act(q[t, h] . k[s]) for begin[t] <= s < end[t]. Of equal scores the lowest index
    wins. The choice has no gradient, the chosen scores have. ``objective`` is what trains them: for each query
    KL(p || softmax(I)) over its chosen keys, p being the attention's own distribution over them.
    Source: DeepSeek-V3.2-Exp (2025), equations 1 to 4.
    """

    family: ClassVar[str] = "indexer"
    top_k: int = dim()
    heads: int = dim(64)
    head_dim: int = dim(128)
    context: int = dim(4096)
    """Keys of a sequence; causal queries see half of them on average."""
    pool: int = dim(16)
    """Tokens that ``compression`` makes one key of."""
    operation: str = "selection"
    """``selection``: scores and the choice; ``objective``: the loss of chosen scores against a target; ``compression``:
    keys of pools of tokens, averaged by a learned softmax for each channel.
    """
    activation: str = "relu"
    """Of each head's product: ``relu`` or ``none``."""
    weighted: bool = True
    """Each query weighs its heads (any sign); else their products are added up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operation not in OPERATIONS or self.activation not in ACTIVATIONS:
            known = f"{', '.join(OPERATIONS)}; activation is one of {', '.join(ACTIVATIONS)}"
            raise ValueError(f"operation is one of {known}")
        sizes = {name: getattr(self, name) for name in ("top_k", "heads", "head_dim", "context", "pool")}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes must be positive, not {sizes}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """What a call takes.

        ``selection``: q [B, S, H, D], k [B, T, D], weights [B, S, H]; begin and end [B, S] int32, the keys that a query
        sees; slots [K], of which only the size is read. ``objective``: scores [B, S, K] fp32, target [B, S, K]
        (not negative, of any sum), count [B, S] int32: how many of a row's slots are in use. ``compression``: k and
        gate [B, T, D], bias [R, D], start [B, P] int32: the first token of each pool of R; a pool that does not lie
        within the sequence is none. Pools must not overlap.
        """
        if self.operation == "compression":
            return (
                TensorRole(name="k"),
                TensorRole(name="gate"),
                TensorRole(name="bias"),
                TensorRole(name="start", differentiable=False),
            )
        if self.operation == "objective":
            return (
                TensorRole(name="scores"),
                TensorRole(name="target", differentiable=False),
                TensorRole(name="count", differentiable=False),
            )
        weights = (TensorRole(name="weights"),) if self.weighted else ()
        visible = tuple(TensorRole(name=name, differentiable=False) for name in ("begin", "end", "slots"))
        return (TensorRole(name="q"), TensorRole(name="k"), *weights, *visible)

    def outputs(self) -> tuple[TensorRole, ...]:
        """scores [B, S, K] fp32 (0 past the count), index [B, S, K] (-1 there), count [B, S] int32; loss; or pooled."""
        if self.operation == "objective":
            return (TensorRole(name="loss"),)
        if self.operation == "compression":
            return (TensorRole(name="pooled"),)
        return (
            TensorRole(name="scores"),
            TensorRole(name="index", differentiable=False),
            TensorRole(name="count", differentiable=False),
        )

    def flops(self, tokens: int, backward: bool = False) -> float:
        """Products of all visible pairs forward; three products of each chosen pair backward."""
        if self.operation == "objective":
            return float(tokens * self.chosen * (4 if backward else 8))
        if self.operation == "compression":
            return float(tokens * self.head_dim * (8 if backward else 6))
        product = 2 * self.heads * self.head_dim
        if backward:
            return float(tokens * self.chosen * 3 * product)
        return float(tokens * (self.context + 1) / 2 * (product + 3 * self.heads))

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Inputs once, outputs once; scores that are not chosen never leave the chip."""
        slots = tokens * self.chosen * 4
        if self.operation == "objective":
            return float(slots * (3 if backward else 2))
        width = DTYPE_BYTES[self.dtype]
        if self.operation == "compression":
            return float(tokens * self.head_dim * width * ((4 if backward else 2) + 1 / self.pool))
        given = tokens * (self.heads * (self.head_dim + self.weighted) + self.head_dim) * width
        # backward reads choice and gradient of the scores, and writes gradients of the inputs
        return float(given * (2 if backward else 1) + 2 * slots)

    @property
    def chosen(self) -> float:
        """Keys that a causal query chooses on average."""
        k, n = self.top_k, self.context
        return (n + 1) / 2 if k >= n else (k * (k + 1) / 2 + k * (n - k)) / n

    def words(self) -> str:
        """E.g. ``indexer, 2048 of 32768 keys, 64 heads x 128, relu, weighted, bfloat16``."""
        if self.operation == "objective":
            return f"indexer objective, {self.top_k} slots, {self.dtype}"
        if self.operation == "compression":
            return f"indexer compression, pools of {self.pool} x {self.head_dim}, {self.dtype}"
        parts = [f"indexer, {self.top_k} of {self.context} keys, {self.heads} heads x {self.head_dim}"]
        if self.activation != "none":
            parts.append(self.activation)
        if self.weighted:
            parts.append("weighted")
        return ", ".join([*parts, self.dtype])
