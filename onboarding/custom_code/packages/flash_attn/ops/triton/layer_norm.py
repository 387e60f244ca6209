"""RMSNorm with an optional added residual."""

from __future__ import annotations

from torch import Tensor

from flash_attn.ops.rms_norm import RMSNorm
from onboarding.custom_code.standins import refuse, rms_normalised

__all__ = ["RMSNorm", "rms_norm_fn"]


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    **extras: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of x + residual; with ``prenorm`` the sum too."""
    refuse(**extras)
    total = x if residual is None else x + residual
    if residual_in_fp32:
        total = total.float()
    y = rms_normalised(total, weight, bias, eps).to(x.dtype)
    return (y, total) if prenorm else y
