"""KDA's decay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fused_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | int | None = None, g_bias: Tensor | None = None, **_: object
) -> Tensor:
    """-exp(A_log) softplus(g + bias), in fp32.

    g ``[..., H, K]``, or ``[..., H * K]`` with the older call's head dim as third argument; A_log has H elements.
    """
    heads = A_log.numel()
    bias = g_bias if isinstance(dt_bias, int) else dt_bias
    width = dt_bias if isinstance(dt_bias, int) else g.shape[-1] if g.shape[-2] == heads else g.shape[-1] // heads
    wide = g.to(torch.promote_types(g.dtype, torch.float32))
    if wide.shape[-1] != width:
        wide = wide.unflatten(-1, (heads, width))
    if bias is not None:
        wide = wide + bias.to(wide.dtype).view(heads, width)
    return -A_log.to(wide.dtype).view(heads, 1).exp() * F.softplus(wide)
