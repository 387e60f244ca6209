"""Spec of linear attention with a decayed matrix state (KDA, gated delta rule and kin). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernel_templates.spec import DTYPE_BYTES, OperatorSpec, TensorRole, dim

DECAYS = ("none", "head", "channel")


@dataclass(frozen=True, kw_only=True)
class Spec(OperatorSpec):
    """S_t = Diag(e^g_t) S_{t-1} + beta_t k_t (v_t - (Diag(e^g_t) S_{t-1})^T k_t)^T;  o_t = scale S_t^T q_t.

    Without the delta rule: S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T. Sources: Yang et al., "Gated Delta Networks"
    (2024), equation 10; Kimi Team, "Kimi Linear" (2025), section 3.
    """

    family: ClassVar[str] = "linear_attention"
    key_heads: int = dim()
    value_heads: int = dim()
    key_dim: int = dim()
    value_dim: int = dim()
    decay: str = "channel"
    """``channel``: g [B, T, HV, K] (KDA); ``head``: g [B, T, HV] (gated delta rule); ``none``: no g."""
    delta: bool = True
    """The delta rule, with beta [B, T, HV] (already through its sigmoid)."""
    qk_l2norm: bool = True
    """q and k are divided by sqrt(sum of squares + 1e-6) inside the operator, before the scale."""
    scale: float | None = None
    """Factor on q; None means key_dim ** -0.5, taken from the tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay not in DECAYS:
            raise ValueError(f"decay must be one of {', '.join(DECAYS)}, not {self.decay!r}")
        if min(self.key_heads, self.value_heads, self.key_dim, self.value_dim) < 1:
            raise ValueError("heads and head dims must be positive")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} must be a multiple of key_heads {self.key_heads}")

    def inputs(self) -> tuple[TensorRole, ...]:
        """q, k [B, T, H, K], v [B, T, HV, V], g, beta, initial_state [N, HV, K, V] fp32, cu_seqlens [N + 1] (B = 1)."""
        roles = [TensorRole(name="q"), TensorRole(name="k"), TensorRole(name="v")]
        if self.decay != "none":
            roles.append(TensorRole(name="g"))
        if self.delta:
            roles.append(TensorRole(name="beta"))
        roles.append(TensorRole(name="initial_state", optional=True))
        roles.append(TensorRole(name="cu_seqlens", differentiable=False, optional=True))
        return tuple(roles)

    def outputs(self) -> tuple[TensorRole, ...]:
        """o [B, T, HV, V] in v's dtype, final_state [N, HV, K, V] fp32 (N = B, or the number of packed sequences)."""
        return (TensorRole(name="o"), TensorRole(name="final_state"))

    def flops(self, tokens: int, backward: bool = False) -> float:
        """Of the chunked form at chunk 64, per token and value head; see the family's README."""
        k, v, c = self.key_dim, self.value_dim, 64
        forward = 2.0 * (2 * c * k + c * v + 3 * k * v)  # two grams, P V', and three state products
        return tokens * self.value_heads * forward * (3 if backward else 1)

    def bytes_moved(self, tokens: int, backward: bool = False) -> float:
        """Inputs and outputs once each, gradients once each backward."""
        qk = 2 * self.key_heads * self.key_dim
        vo = 2 * self.value_heads * self.value_dim
        gate = self.value_heads * (self.key_dim if self.decay == "channel" else 1)
        forward = qk + vo + gate
        count = 2 * forward - self.value_heads * self.value_dim if backward else forward
        return float(tokens * count * DTYPE_BYTES[self.dtype])

    def words(self) -> str:
        """E.g. ``delta rule, decay per channel, 32 heads of 128, bf16``."""
        parts = ["delta rule" if self.delta else "linear attention"]
        parts.append("no decay" if self.decay == "none" else f"decay per {self.decay}")
        heads = f"{self.value_heads} heads of {self.key_dim}"
        if self.key_heads != self.value_heads:
            heads = f"{self.key_heads} key and {self.value_heads} value heads of {self.key_dim}"
        if self.value_dim != self.key_dim:
            heads += f" x {self.value_dim}"
        return ", ".join([*parts, heads, self.dtype])
