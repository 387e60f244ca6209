"""Spec of attention over a list of selected keys. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """o_t = sum_j P_tj v_j over the keys j that row t of ``index`` lists, P = softmax(scale q k) with a sink.

    Sources: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2 (attention over the keys that an indexer selects, on the
    absorbed form of multi-head latent attention); OpenAI, "gpt-oss" (2025) for the sink.
    """

    family: ClassVar[str] = "sparse_attention"
    heads: int = dim()
    """Query heads."""
    kv_heads: int = dim(1)
    """Key heads; ``heads / kv_heads`` query heads in a row share one."""
    key_dim: int = dim()
    """Columns of q and k, without the rotary ones."""
    rope_dim: int = dim(0)
    """Columns of q_rope and k_rope; 0 without them."""
    value_dim: int = dim()
    """Columns of v; those of k where values are not separate."""
    top_k: int = dim()
    """Width of a list."""
    keys: int = dim(0)
    """Keys that the lists choose from; 0: as many as queries."""
    rope: bool = False
    """The score has a second part, q_rope . k_rope, that is no part of the value (multi-head latent attention)."""
    separate: bool = False
    """Values are a tensor of their own; otherwise the value of a key is the key (k, without its rotary part)."""
    sink: bool = False
    """Every head has a logit that takes part in the softmax and has no value."""
    scale: float | None = None
    """Factor on the scores; None means (columns of q and q_rope) ** -0.5, taken from the tensors."""
    target: bool = False
    """Also return ``target``: the probabilities of each slot, summed over the heads that share the list."""
    deterministic: bool = True
    """Gradients of keys and values are ordered sums, bitwise repeatable; otherwise fp32 atomics add them up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.heads, self.kv_heads, self.key_dim, self.value_dim, self.top_k) < 1:
            raise ValueError("heads, kv_heads, key_dim, value_dim and top_k must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.rope != (self.rope_dim > 0):
            raise ValueError(f"rope_dim is {self.rope_dim}: it must be positive with rope and 0 without")
        if not self.separate and self.value_dim != self.key_dim:
            raise ValueError(f"without separate values value_dim {self.value_dim} must be key_dim {self.key_dim}")
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be positive and finite, not {self.scale}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """q [T, H, D], k [S, G, D], v [S, G, V], q_rope [T, H, R], k_rope [S, G, R], sink [H] as the flags say; index.

        ``index`` int32 or int64: [T, K], shared by all heads, or [T, G, K], one list a key head. Numbers outside
        [0, S) stand for no key; the order is free (ascending reads best); a key listed twice counts twice.
        """
        roles = [TensorRole(name="q"), TensorRole(name="k")]
        if self.separate:
            roles.append(TensorRole(name="v"))
        if self.rope:
            roles += [TensorRole(name="q_rope"), TensorRole(name="k_rope")]
        roles.append(TensorRole(name="index", differentiable=False))
        if self.sink:
            roles.append(TensorRole(name="sink"))
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """o [T, H, V] in q's dtype; target fp32, of index's shape, without gradient."""
        roles = [TensorRole(name="o")]
        if self.target:
            roles.append(TensorRole(name="target", differentiable=False))
        return tuple(roles)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """Of full lists: scores and values forward; scores, dP, dQ, dK and dV backward; scores again for a target."""
        width, value = self.key_dim + self.rope_dim, self.value_dim
        each = 3 * width + 2 * value if backward else width * (1 + self.target) + value
        return 2.0 * tokens * self.heads * self.top_k * each

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Queries, outputs, lists and keys once each; gradients once each backward."""
        width, value = self.key_dim + self.rope_dim, self.value_dim
        keys = (self.keys or tokens) * self.kv_heads * (width + value * self.separate)
        forward = tokens * self.heads * (width + value) + keys
        count = 2 * forward + tokens * self.heads * value if backward else forward
        return float(count * DTYPE_BYTES[self.dtype]) + 4.0 * tokens * self.top_k * (1 + self.target)

    def words(self) -> str:
        """E.g. ``sparse attention, 2048 keys a query, 64 heads on 1 of 512 + 64, bf16``."""
        size = f"{self.key_dim} + {self.rope_dim}" if self.rope else str(self.key_dim)
        if self.separate:
            size += f" x {self.value_dim}"
        parts = [f"sparse attention, {self.top_k} keys a query, {self.heads} heads on {self.kv_heads} of {size}"]
        if self.sink:
            parts.append("sinks")
        if self.target:
            parts.append("summed probabilities")
        if not self.deterministic:
            parts.append("unordered sums")
        return ", ".join([*parts, self.dtype])
