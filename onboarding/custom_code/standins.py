"""What the stand-ins for optional packages share: the mark that the parser reads, exact attention, and recurrences.

A stand-in computes what the package documents, in plain torch, for any float dtype and with gradients: slow and right.
It is there so that code which imports the package can be read, traced, judged and aligned on a machine without it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Function = TypeVar("Function", bound=Callable[..., Any])


def stands_for(kernel: str, package: str, *, loops: bool = False) -> Callable[[Function], Function]:
    """Mark a function as the stand-in of a library's: the parser treats it as one node (``parse/marked.py``).

    Args:
        kernel: the library's name for it.
        package: the library.
        loops: it runs one step a token, so the parser measures it short and extends the cost.
    """

    def mark(function: Function) -> Function:
        told: Any = function
        told.stands_for, told.loops = (kernel, package), loops
        return function

    return mark


class _Caller(nn.Module):
    """Who calls attention: the interface wants a module with these settings."""

    def __init__(self, groups: int, causal: bool) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, causal


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """Exact attention in the layout of flash-attn.

    Args:
        q: ``[B, T, H, D]``.
        k: ``[B, S, HK, D]``, H a multiple of HK.
        v: ``[B, S, HK, DV]``.
        causal: aligned at the last key.
        scale: of the scores; D ** -0.5 by default.
        window: keys visible to the left and right of the diagonal; -1 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        dropout: of the probabilities.

    Returns:
        ``[B, T, H, DV]``.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", sdpa_attention_forward)
    if interface is not sdpa_attention_forward:  # the parser listens here
        left = window[0] + 1 if window[0] >= 0 else None
        caller = _Caller(groups, causal)
        limited = window != (-1, -1) and not (causal and window[0] < 0)
        mask = visible_pairs(q.shape[1], k.shape[1], causal, window, q.device)[None, None] if limited else None
        out: Tensor = interface(
            caller, queries, keys, values, mask, scaling=scale, is_causal=causal, sliding_window=left,
            softcap=softcap or None,
        )[0]  # fmt: skip
        return out
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_pairs(q.shape[1], k.shape[1], causal, window, q.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    share = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    share = F.dropout(share.nan_to_num(0.0).to(q.dtype), dropout)
    return torch.matmul(share, values).transpose(1, 2)


def visible_pairs(queries: int, keys: int, causal: bool, window: tuple[int, int], device: Any) -> Tensor:
    """Which key each query sees, ``[T, S]``; the last query stands at the last key."""
    row = torch.arange(queries, device=device)[:, None] + (keys - queries)
    column = torch.arange(keys, device=device)[None]
    left, right = window
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal or right >= 0:
        visible = visible & (column <= row + (0 if causal else right))
    if left >= 0:
        visible = visible & (column >= row - left)
    return visible


def packed(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(start, end) of the packed sequences."""
    ends = [int(n) for n in cu_seqlens.tolist()]
    return list(pairwise(ends))


def l2_normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def rms_normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dim, in fp32 (fp64 for fp64), in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The family's reference recurrence, called as fla calls its operators; in fp32 (fp64 for fp64) inside.

    Shapes: q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV]`` or ``[B, T, HV, K]``, beta ``[B, T, HV]``.
    """
    from kernel_templates.linear_attention.reference import reference
    from kernel_templates.linear_attention.spec import Spec

    decay = "none" if g is None else "channel" if g.dim() == 4 else "head"
    spec = Spec(
        key_heads=k.shape[2], value_heads=v.shape[2], key_dim=k.shape[3], value_dim=v.shape[3], decay=decay,
        delta=beta is not None, qk_l2norm=qk_l2norm, scale=scale, dtype="float32",
    )  # fmt: skip
    wide = torch.promote_types(v.dtype, torch.float32)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    tensors: dict[str, Tensor | None] = {n: None if x is None else x.to(wide) for n, x in given.items()}
    tensors["cu_seqlens"] = cu_seqlens
    found = reference(tensors, spec)
    return found["o"].to(v.dtype), found["final_state"] if output_final_state else None


def refuse(**extras: Any) -> None:
    """A setting that the stand-in does not compute must not pass in silence.

    Raises:
        NotImplementedError: one of them is set.
    """
    asked = [name for name, value in extras.items() if value not in (None, False, 0, 0.0)]
    if asked:
        raise NotImplementedError(f"this stand-in does not compute {', '.join(asked)}")
