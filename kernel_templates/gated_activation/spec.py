"""Spec of gated activations (SwiGLU and kin). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
LAYOUTS = ("separate", "concatenated", "interleaved")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """y = act(alpha-scaled gate) * (up + up_offset), both clamped by ``limit`` where set.

    With ``limit``: gate is clamped from above only, up from both sides (gpt-oss). ``silu`` is
    ``gate * sigmoid(alpha * gate)``. Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    family: ClassVar[str] = "gated_activation"
    width: int = dim()
    activation: str = "silu"
    layout: str = "separate"
    """``separate``: inputs gate and up [..., I]; else one gate_up [..., 2I], halves or alternating columns."""
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {self.activation!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}")
        if self.width < 1:
            raise ValueError(f"width must be positive, not {self.width}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, not {self.limit}")
        if self.alpha != 1.0 and self.activation != "silu":
            raise ValueError("alpha scales the sigmoid of silu only")

    def inputs(self) -> tuple[TensorRole, ...]:
        """gate and up [..., I], or gate_up [..., 2I]."""
        if self.layout == "separate":
            return (TensorRole(name="gate"), TensorRole(name="up"))
        return (TensorRole(name="gate_up"),)

    def outputs(self) -> tuple[TensorRole, ...]:
        """y [..., I]."""
        return (TensorRole(name="y"),)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """About 6 operations an element forward, 12 backward."""
        return float(tokens * self.width * (12 if backward else 6))

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Forward: read gate, up, write y. Backward: read dy, gate, up, write dgate, dup."""
        return float(tokens * self.width * (5 if backward else 3) * DTYPE_BYTES[self.dtype])

    def words(self) -> str:
        """E.g. ``silu gate, 9216 wide, bf16``."""
        parts = [f"{self.activation} gate, {self.width} wide"]
        if self.limit is not None:
            parts.append(f"clamped at {self.limit:g}")
        if self.layout != "separate":
            parts.append(f"{self.layout} gate and up")
        return ", ".join([*parts, self.dtype])
