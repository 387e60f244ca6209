"""Spec of RMSNorm, LayerNorm and their variants. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

GATES = ("none", "sigmoid", "silu")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """y = x * rsqrt(mean(x^2) + eps) * w (+ b), over the last dim, in fp32, rounded once.

    Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4; with ``centred`` Ba, Kiros
    and Hinton, "Layer Normalization" (2016), equation 4.
    """

    family: ClassVar[str] = "norm"
    hidden: int = dim()
    eps: float = 1e-6
    offset: bool = False
    """The scale is ``1 + w`` (zero-centred weights) instead of ``w``."""
    weighted: bool = True
    """There is a weight at all."""
    gate: str = "none"
    """``y *= act(gate)`` with act ``sigmoid`` or ``silu``, after the scale."""
    centred: bool = False
    """LayerNorm: the row's mean is subtracted first, so that the mean square is its variance."""
    bias: bool = False
    """A bias is added after the scale."""
    residual: bool = False
    """Fused add: x + residual is normalised, and also returned as ``residual_out``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate not in GATES:
            raise ValueError(f"gate must be one of {', '.join(GATES)}, not {self.gate!r}")
        if self.hidden < 1:
            raise ValueError(f"hidden must be positive, not {self.hidden}")
        if self.offset and not self.weighted:
            raise ValueError("an offset needs a weight")
        if self.bias and (not self.weighted or self.gate != "none"):
            raise ValueError("a bias comes with a weight and without a gate")

    def inputs(self) -> tuple[TensorRole, ...]:
        """x [..., D], then weight [D], bias [D], gate [..., D], residual [..., D] where the flags ask for them."""
        roles = [TensorRole(name="x")]
        if self.weighted:
            roles.append(TensorRole(name="weight"))
        if self.bias:
            roles.append(TensorRole(name="bias"))
        if self.gate != "none":
            roles.append(TensorRole(name="gate"))
        if self.residual:
            roles.append(TensorRole(name="residual"))
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """y [..., D], and residual_out [..., D] with a fused add."""
        roles = [TensorRole(name="y")]
        if self.residual:
            roles.append(TensorRole(name="residual_out"))
        return tuple(roles)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """About 4 operations an element forward, 8 backward, 4 more for a gate, 2 for a mean."""
        per_element = (8 if backward else 4) + 2 * self.centred + (0 if self.gate == "none" else 4 * (1 + backward))
        return float(tokens * self.hidden * per_element)

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Activations once each; the weight is negligible and counted once."""
        extra = (self.gate != "none") + self.residual
        # forward: read x (+ gate, residual), write y (+ residual_out)
        forward = 1 + extra + 1 + self.residual
        # backward: read dy and x (+ gate, + d residual_out), write dx (+ dgate); residual shares dx
        backward_count = 2 + (self.gate != "none") + self.residual + 1 + (self.gate != "none")
        count = backward_count if backward else forward
        return float(tokens * self.hidden * count * DTYPE_BYTES[self.dtype] + self.hidden * 4)

    def words(self) -> str:
        """E.g. ``RMSNorm 2304, gated by sigmoid, bf16``."""
        parts = [f"{'LayerNorm' if self.centred else 'RMSNorm'} {self.hidden}"]
        if self.bias:
            parts.append("bias")
        if self.offset:
            parts.append("scale 1 + w")
        if not self.weighted:
            parts.append("unweighted")
        if self.gate != "none":
            parts.append(f"gated by {self.gate}")
        if self.residual:
            parts.append("fused residual add")
        return ", ".join([*parts, self.dtype])
