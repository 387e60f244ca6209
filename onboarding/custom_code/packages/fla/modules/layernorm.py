"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onboarding.custom_code.standins import refuse, rms_normalised


class RMSNorm(nn.Module):
    """RMSNorm with an optional weight and bias."""

    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, bias: bool = False, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: Tensor, **extras: object) -> Tensor:
        """x ``[..., D]``."""
        refuse(**extras)
        return rms_normalised(x, self.weight, self.bias, self.eps)
