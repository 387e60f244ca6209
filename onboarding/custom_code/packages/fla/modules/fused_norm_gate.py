"""RMSNorm times a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.custom_code.standins import refuse, rms_normalised


class FusedRMSNormGated(nn.Module):
    """RMSNorm(x) * act(g), act one of swish, silu and sigmoid; in fp32 inside."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"Unsupported activation: {activation}")
        self.hidden_size, self.elementwise_affine, self.eps, self.activation = (
            hidden_size, elementwise_affine, eps, activation,
        )  # fmt: skip
        weight = torch.ones(hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight) if elementwise_affine else None

    def forward(self, x: Tensor, g: Tensor, **extras: object) -> Tensor:
        """x and g ``[..., D]``."""
        refuse(**extras)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = rms_normalised(x.to(wide), self.weight, None, self.eps)
        gate = g.to(wide)
        return (y * (torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate))).to(x.dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """The older name of the swish variant."""

    def __init__(self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, elementwise_affine, eps)
