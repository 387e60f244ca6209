"""RMSNorm with a silu gate, before or after it, over the whole width or in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onboarding.custom_code.standins import rms_normalised


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """norm(x) * silu(z), or norm(x * silu(z)); x and z ``[..., D]``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y, gate = x.to(wide), None if z is None else F.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = x.shape[-1] // (group_size or x.shape[-1])
    y = rms_normalised(y.unflatten(-1, (groups, -1)), None, None, eps).flatten(-2) * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return (y * gate if gate is not None and norm_before_gate else y).to(x.dtype)


class RMSNorm(nn.Module):
    """The module of the same."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """x and z ``[..., D]``."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
