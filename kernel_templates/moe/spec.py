"""Spec of routed gated experts: permute, grouped GEMMs, weighted unpermute. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.gated_activation.spec import ACTIVATIONS
from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

GATE_UP_LAYOUTS = ("concatenated", "interleaved")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """y_t = sum_j s_tj W2_e (act(W1_e x_t)), e = index_tj; routing itself is not part of it.

    An index equal to ``experts`` (or larger, or negative) means "no expert": the slot adds nothing, gets no gradient.
    """

    family: ClassVar[str] = "moe"
    experts: int = dim()
    top_k: int = dim()
    hidden: int = dim()
    intermediate: int = dim()
    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    gate_up_layout: str = "concatenated"
    """Rows of W1: ``concatenated`` [gate; up] or ``interleaved`` gate0, up0, gate1, ..."""
    transposed: bool = False
    """Weights stored [E, in, out] instead of [E, out, in]."""
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}")
        if self.gate_up_layout not in GATE_UP_LAYOUTS:
            raise ValueError(f"gate_up_layout must be one of {', '.join(GATE_UP_LAYOUTS)}, not {self.gate_up_layout!r}")
        if min(self.experts, self.top_k, self.hidden, self.intermediate) < 1:
            raise ValueError("experts, top_k, hidden and intermediate must be positive")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} exceeds experts {self.experts}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """x [T, D], index [T, K] int64, scores [T, K], gate_up [E, 2I, D], down [E, D, I], biases [E, 2I], [E, D]."""
        roles = [
            TensorRole(name="x"),
            TensorRole(name="index", differentiable=False),
            TensorRole(name="scores"),
            TensorRole(name="gate_up"),
            TensorRole(name="down"),
        ]
        if self.bias:
            roles += [TensorRole(name="gate_up_bias"), TensorRole(name="down_bias")]
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """y [T, D]."""
        return (TensorRole(name="y"),)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """6 R D I forward with R = tokens x top_k rows, twice that backward (data and weight gradients)."""
        forward = 6.0 * tokens * self.top_k * self.hidden * self.intermediate
        return 2 * forward if backward else forward

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Weights of the experts that are hit once, x and y once; backward also reads dy, writes dx and dW."""
        hit = min(self.experts, tokens * self.top_k)
        weights = 3.0 * hit * self.hidden * self.intermediate
        activations = 2.0 * tokens * self.hidden
        count = (2 * weights + 2 * activations) if backward else (weights + activations)
        return count * DTYPE_BYTES[self.dtype]

    def words(self) -> str:
        """E.g. ``256 experts, top 8, 2304 x 1024, silu, bf16``."""
        parts = [f"{self.experts} experts, top {self.top_k}, {self.hidden} x {self.intermediate}, {self.activation}"]
        if self.limit is not None:
            parts.append(f"clamped at {self.limit:g}")
        if self.bias:
            parts.append("biases")
        return ", ".join([*parts, self.dtype])
