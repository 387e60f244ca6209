"""The selective scan of Mamba (Gu and Dao, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboarding.custom_code.standins import stands_for


@stands_for("selective_scan_fn", "mamba_ssm", loops=True)
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = exp(delta_t A) h_(t-1) + delta_t B_t u_t;  y_t = C_t h_t + D u_t, times silu(z_t).

    u, delta, z ``[B, D, L]``; A ``[D, N]``; B and C ``[D, N]``, ``[B, N, L]`` or ``[B, G, N, L]``; D and delta_bias
    ``[D]``. The last state is ``[B, D, N]``.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    step = delta.to(wide) if delta_bias is None else delta.to(wide) + delta_bias.to(wide)[:, None]
    step = F.softplus(step) if delta_softplus else step
    x = u.to(wide)
    entering, leaving = (_per_channel(m.to(wide), u.shape[1], u.shape[2]) for m in (B, C))
    state = x.new_zeros(*x.shape[:2], A.shape[1])
    outputs = []
    for t in range(x.shape[-1]):
        now = step[..., t, None]
        state = torch.exp(now * A.to(wide)) * state + now * entering[..., t] * x[..., t, None]
        outputs.append((state * leaving[..., t]).sum(-1))
    y = torch.stack(outputs, -1) if outputs else x
    if D is not None:
        y = y + D.to(wide)[:, None] * x
    if z is not None:
        y = y * F.silu(z.to(wide))
    return (y.to(u.dtype), state) if return_last_state else y.to(u.dtype)


def _per_channel(m: Tensor, channels: int, length: int) -> Tensor:
    """``[1 or B, D, N, L]``."""
    if m.dim() == 2:
        return m[None, :, :, None].expand(1, *m.shape, length)
    if m.dim() == 3:
        m = m[:, None]
    return m.repeat_interleave(channels // m.shape[1], 1)
