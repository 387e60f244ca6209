"""Gated linear attention: a decay per channel, no delta rule."""

from __future__ import annotations

from torch import Tensor

from onboarding.custom_code.standins import linear_attention, refuse, stands_for


@stands_for("chunk_gla", "fla", loops=True)
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **extras: object,
) -> tuple[Tensor, Tensor | None]:
    """q, k ``[B, T, H, K]``, v ``[B, T, H, V]``, g ``[B, T, H, K]`` (logarithms)."""
    refuse(**extras)
    return linear_attention(
        q, k, v, gk if gk is not None else g, None, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


fused_recurrent_gla = chunk_gla
