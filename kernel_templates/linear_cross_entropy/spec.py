"""Spec of a linear layer followed by cross-entropy, without logits in memory. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

REDUCTIONS = ("mean", "sum", "none", "statistics")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """Cross-entropy of z = cap(scale (x W^T + b)) against target classes, in fp32 from the products on.

    loss = lse - (1 - a) z[target] - a mean(z) + k lse^2 a row, with lse = logsumexp(z), label smoothing a and z-loss
    k; cap(z) = c tanh(z / c). Rows whose target is ``ignore_index`` count nothing; a target outside the vocabulary
    makes the loss NaN. Sources: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7, for the
    smoothing; de Brebisson and Vincent, "The Z-loss" (2016), in PaLM's form, for the z-loss.
    """

    family: ClassVar[str] = "linear_cross_entropy"
    library_products: ClassVar[bool] = True
    hidden: int = dim()
    vocabulary: int = dim()
    """Classes; of this rank's shard where the vocabulary is sharded."""
    reduction: str = "mean"
    """``mean`` divides the sum by the input ``denominator``, or without one by the number of rows that count (no such
    row: 0). ``statistics`` gives lse, z[target] and (with smoothing) the sum of z by row, all differentiable, of which
    ranks with a shard of the vocabulary each make the loss: see ``merged`` in ``reference.py``."""
    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    frozen: bool = False
    """Weight and bias get no gradient, whoever asks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {self.reduction!r}")
        if self.hidden < 1 or self.vocabulary < 1:
            raise ValueError(f"sizes must be positive, not {self.hidden} and {self.vocabulary}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, not {self.softcap}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), not {self.label_smoothing}")
        if self.z_loss < 0.0:
            raise ValueError(f"z_loss must not be negative, not {self.z_loss}")
        if self.logit_scale == 0.0:
            raise ValueError("a logit_scale of 0 leaves nothing to learn from")

    def inputs(self) -> tuple[TensorRole, ...]:
        """x [..., D], weight [V, D], bias [V], target [...] int64, denominator [] fp32."""
        roles = [TensorRole(name="x"), TensorRole(name="weight", differentiable=not self.frozen)]
        if self.bias:
            roles.append(TensorRole(name="bias", differentiable=not self.frozen))
        roles.append(TensorRole(name="target", differentiable=False))
        if self.reduction == "mean":
            roles.append(TensorRole(name="denominator", differentiable=False, optional=True))
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """loss [] or [...] fp32; or lse, target_logit and (with smoothing) total, [...] fp32."""
        if self.reduction != "statistics":
            return (TensorRole(name="loss"),)
        names = ("lse", "target_logit", "total") if self.label_smoothing else ("lse", "target_logit")
        return tuple(TensorRole(name=name) for name in names)

    def flops(self, tokens: int, backward: bool = False) -> float:
        """One product forward; backward one for x and one for the weight."""
        product = 2.0 * tokens * self.hidden * self.vocabulary
        return product * ((1 if self.frozen else 2) if backward else 1)

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """x and the weight read once; backward also writes their gradients."""
        x, weight = float(tokens * self.hidden), float(self.vocabulary * self.hidden)
        count = (2 * x + (1 if self.frozen else 2) * weight) if backward else x + weight
        return count * DTYPE_BYTES[self.dtype]

    def words(self) -> str:
        """E.g. ``linear 2304 to 163840 + cross-entropy, mean, bfloat16``."""
        parts = [f"linear {self.hidden} to {self.vocabulary} + cross-entropy", self.reduction]
        if self.bias:
            parts.append("bias")
        if self.softcap is not None:
            parts.append(f"capped at {self.softcap:g}")
        if self.logit_scale != 1.0:
            parts.append(f"logits times {self.logit_scale:g}")
        if self.label_smoothing:
            parts.append(f"smoothing {self.label_smoothing:g}")
        if self.z_loss:
            parts.append(f"z-loss {self.z_loss:g}")
        if self.frozen:
            parts.append("frozen weight")
        return ", ".join([*parts, self.dtype])
