"""The two functions of causal-conv1d."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboarding.custom_code.standins import refuse, stands_for


@stands_for("causal_conv1d_fn", "causal_conv1d")
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x ``[B, D, L]``, weight ``[D, W]`` -> ``[B, D, L]``: y_t = act(bias + sum_w weight_w x_(t - W + 1 + w))."""
    refuse(seq_idx=seq_idx is not None, final_states_out=final_states_out is not None)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu or swish")
    width = weight.shape[-1]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states.to(x.dtype)
    padded = torch.cat([before, x], -1)
    y = F.conv1d(padded.to(weight.dtype), weight[:, None], bias, groups=x.shape[1])
    y = (F.silu(y) if activation else y).to(x.dtype)
    return (y, padded[..., padded.shape[-1] - (width - 1) :]) if return_final_states else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **extras: object,
) -> Tensor:
    """One or more steps of decoding; ``conv_state`` ``[B, D, S]`` moves on in place."""
    refuse(**extras)
    steps = x if x.dim() == 3 else x[..., None]
    together = torch.cat([conv_state, steps], -1)
    conv_state.copy_(together[..., -conv_state.shape[-1] :])
    y = F.conv1d(together.to(weight.dtype), weight[:, None], bias, groups=x.shape[1])[..., -steps.shape[-1] :]
    y = (F.silu(y) if activation else y).to(x.dtype)
    return y if x.dim() == 3 else y[..., 0]
