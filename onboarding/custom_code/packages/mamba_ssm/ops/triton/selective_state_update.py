"""One decoding step of the selective scan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """state ``[B, (H,) D, N]`` moves on in place; x, dt, z ``[B, (H,) D]``; B, C ``[B, (G,) N]``."""
    step = dt if dt_bias is None else dt + dt_bias
    step = F.softplus(step) if dt_softplus else step
    if state.dim() == 4:
        B, C = (m.repeat_interleave(state.shape[1] // m.shape[1], 1) for m in (B, C))
    entering, leaving = (m.unsqueeze(-2) for m in (B, C))
    state.copy_(state * torch.exp(step[..., None] * A) + step[..., None] * entering * x[..., None])
    y = (state * leaving).sum(-1).to(x.dtype)
    if D is not None:
        y = y + x * D
    return y if z is None else y * F.silu(z)
