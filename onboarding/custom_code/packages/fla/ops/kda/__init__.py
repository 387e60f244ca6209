"""Kimi delta attention: a decay per channel and the delta rule."""

from __future__ import annotations

from torch import Tensor

from fla.ops.kda.gate import fused_kda_gate
from onboarding.custom_code.standins import linear_attention, refuse, stands_for


@stands_for("chunk_kda", "fla", loops=True)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **extras: object,
) -> tuple[Tensor, Tensor | None]:
    """q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV, K]`` (logarithms), beta ``[B, T, HV]``."""
    refuse(**extras)
    if use_gate_in_kernel:
        assert A_log is not None
        g = fused_kda_gate(g, A_log, dt_bias)
    return linear_attention(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


fused_recurrent_kda = chunk_kda
