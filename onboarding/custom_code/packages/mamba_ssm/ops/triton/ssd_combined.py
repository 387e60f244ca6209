"""The state space dual scan of Mamba-2 (Dao and Gu, 2024)."""

from __future__ import annotations

import torch
from causal_conv1d import causal_conv1d_fn
from torch import Tensor
from torch.nn import functional as F

from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from onboarding.custom_code.standins import refuse, stands_for


@stands_for("mamba_chunk_scan_combined", "mamba_ssm", loops=True)
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T;  y_t = h_t C_t + D x_t, times silu(z_t).

    x, z ``[B, L, H, P]``; dt ``[B, L, H]``; A, dt_bias ``[H]``; B, C ``[B, L, G, N]``; D ``[H]`` or ``[H, P]``; states
    ``[B, H, P, N]``.
    """
    refuse(seq_idx=seq_idx is not None, cu_seqlens=cu_seqlens is not None)
    wide = torch.promote_types(x.dtype, torch.float32)
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = F.softplus(step) if dt_softplus else step
    if dt_limit != (0.0, float("inf")):
        step = step.clamp(*dt_limit)
    heads = x.shape[2]
    entering, leaving = (m.to(wide).repeat_interleave(heads // m.shape[2], 2) for m in (B, C))
    inputs = x.to(wide)
    state = inputs.new_zeros(x.shape[0], heads, x.shape[3], B.shape[3])
    if initial_states is not None:
        state = state + initial_states.to(wide)
    outputs = []
    rate = A.to(wide)[:, None, None]
    # split once: the gradient of a slice is as long as the sequence
    for now, new, come, go in zip(*(each.unbind(1) for each in (step, inputs, entering, leaving)), strict=True):
        now, come, go = now[..., None, None], come[:, :, None], go[:, :, None]
        state = torch.exp(now * rate) * state + now * (new[..., None] * come)
        outputs.append((state * go).sum(-1))
    y = torch.stack(outputs, 1) if outputs else inputs
    if D is not None:
        y = y + (D.to(wide) if D.dim() == 2 else D.to(wide)[:, None]) * inputs
    if z is not None:
        y = y * F.silu(z.to(wide))
    return (y.to(x.dtype), state) if return_final_states else y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The whole mixer after its first projection: split, convolve, scan, norm with gate, project."""
    heads = dt_bias.shape[0]
    channels = conv1d_weight.shape[0]
    inner = zxbcdt.shape[-1] - channels - heads
    state = (channels - inner) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    convolved = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    x, b, c = convolved.transpose(1, 2).split([inner, ngroups * state, ngroups * state], -1)
    width = headdim or inner // heads
    found = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, width)), dt, A, b.unflatten(-1, (ngroups, state)), c.unflatten(-1, (ngroups, state)),
        chunk_size, D=D, z=None if rmsnorm_weight is not None else z.unflatten(-1, (heads, width)), dt_bias=dt_bias,
        initial_states=initial_states, dt_softplus=True, dt_limit=dt_limit, return_final_states=True,
    )  # fmt: skip
    y, last = found[0].flatten(2), found[1]
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z=z, eps=rmsnorm_eps, norm_before_gate=norm_before_gate)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, last) if return_final_states else y
