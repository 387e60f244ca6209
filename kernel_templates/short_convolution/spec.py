"""Spec of the short causal convolution along the sequence, one filter a channel. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

ACTIVATIONS = ("none", "silu")
WIDEST = 8


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """y[t, d] = act(bias[d] + sum_w weight[d, w] x[t - (W - 1) + w, d]); before a sequence there is zero, or a state.

    Source: Gu and Dao, "Mamba" (2023), section 3.4 and figure 3; in linear attention Yang et al., "Gated Delta
    Networks" (2024), section 3.4.
    """

    family: ClassVar[str] = "short_convolution"
    channels: int = dim()
    width: int = 4
    """Taps W, 2 to 8."""
    activation: str = "silu"
    """``silu`` or ``none``."""
    bias: bool = False
    states: bool = False
    """The last W - 1 inputs of each sequence go in (optional) and out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}")
        if not 2 <= self.width <= WIDEST:
            raise ValueError(f"width must be 2 to {WIDEST} taps, not {self.width}")
        if self.channels < 1:
            raise ValueError(f"channels must be positive, not {self.channels}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """x [B, T, D], weight [D, W], bias [D], initial_state [N, D, W - 1], cu_seqlens [N + 1] (then B = 1)."""
        roles = [TensorRole(name="x"), TensorRole(name="weight")]
        if self.bias:
            roles.append(TensorRole(name="bias"))
        if self.states:
            roles.append(TensorRole(name="initial_state", optional=True))
        roles.append(TensorRole(name="cu_seqlens", differentiable=False, optional=True))
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """y [B, T, D], and final_state [N, D, W - 1] (N = B, or the number of packed sequences)."""
        roles = [TensorRole(name="y")]
        if self.states:
            roles.append(TensorRole(name="final_state"))
        return tuple(roles)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """A multiply-add a tap, four operations for an activation; backward one more for dx and one for dweight."""
        per_element = 2 * self.width * (3 if backward else 1) + (0 if self.activation == "none" else 4 + 4 * backward)
        return float(tokens * self.channels * per_element)

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Forward reads x and writes y; backward reads x and dy and writes dx."""
        return float(tokens * self.channels * (3 if backward else 2) * DTYPE_BYTES[self.dtype])

    def words(self) -> str:
        """E.g. ``short convolution, 12288 channels, 4 taps, silu, bf16``."""
        parts = [f"short convolution, {self.channels} channels, {self.width} taps"]
        if self.activation != "none":
            parts.append(self.activation)
        if self.bias:
            parts.append("bias")
        if self.states:
            parts.append("states")
        return ", ".join([*parts, self.dtype])
