"""Exact definitions of what models are claimed to compute, in plain torch, any float dtype, differentiable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale q k^T) + bias) v over the visible keys.

    Args:
        q: [B, H, T, D]; k, v: [B, HK, S, D], [B, HK, S, DV]; query head h reads key head h // (H / HK).
        visible: bool, broadcastable to [B, H, T, S]; None: every key.
        softcap: cap(s) = c tanh(s / c) before the mask.
        bias: added to the scores.
        sinks: [H], or [B, H, T, 1]: one more logit in every row's denominator, with no value.

    Returns:
        [B, T, H, DV].
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.numel() == scores.shape[1] else sinks
        column = column.expand(scores.shape[0], scores.shape[1], scores.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ v).transpose(1, 2)


def pattern(kind: str, tokens: int, extent: int | None = None) -> Tensor:
    """Which keys a query sees, bool [T, T].

    Args:
        kind: ``full``, ``sliding`` (the last ``extent``), ``chunked`` (of ``extent``) or ``bidirectional``.
    """
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    if kind == "bidirectional":
        return torch.ones(tokens, tokens, dtype=torch.bool)
    causal = j <= i
    if kind == "sliding":
        return causal & (i - j < int(extent or 0))
    if kind == "chunked":
        return causal & (i // int(extent or 1) == j // int(extent or 1))
    return causal


@dataclass(frozen=True, kw_only=True)
class NormForm:
    """A normalisation: y = act(gate) * (w + offset) * x / size(x) + b."""

    kind: str
    """``rms``, ``layer`` (mean taken off), ``l2``."""
    eps: float
    offset: float = 0.0
    gate: str = ""
    gate_first: bool = False
    """The gate is multiplied in before the norm (Mamba-2)."""
    group: int | None = None
    """Channels that are normalised together; None: all."""

    def words(self) -> str:
        """E.g. ``RMSNorm (1 + w), gated by silu``."""
        name = {"rms": "RMSNorm", "layer": "LayerNorm", "l2": "L2 norm"}[self.kind]
        parts = [name + (f" ({self.offset:g} + w)" if self.offset else "")]
        if self.gate:
            parts.append(f"gated by {self.gate}" + (" before it" if self.gate_first else ""))
        if self.group:
            parts.append(f"groups of {self.group}")
        return ", ".join(parts)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, form: NormForm) -> Tensor:
    """The normalisation over the last dim; Zhang and Sennrich (2019) for RMS, Ba et al. (2016) with the mean."""
    act = ACTIVATIONS[form.gate] if form.gate else None
    if act is not None and gate is not None and form.gate_first:
        x = x * act(gate)
    shape = x.shape
    grouped = x.reshape(*shape[:-1], -1, form.group) if form.group else x
    if form.kind == "layer":
        grouped = grouped - grouped.mean(-1, keepdim=True)
    square = grouped.pow(2).sum(-1, keepdim=True) if form.kind == "l2" else grouped.pow(2).mean(-1, keepdim=True)
    y = (grouped * torch.rsqrt(square + form.eps)).reshape(shape)
    if weight is not None:
        y = y * (weight + form.offset)
    if bias is not None:
        y = y + bias
    if act is not None and gate is not None and not form.gate_first:
        y = y * act(gate)
    return y


def halves(outputs: list[Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Gate and up out of one or two projections."""
    if layout == "separate":
        return outputs[0], outputs[1]
    if layout == "concatenated":
        gate, up = outputs[0].chunk(2, dim=-1)
        return gate, up
    return outputs[0][..., ::2], outputs[0][..., 1::2]


def gate_value(gate: Tensor, up: Tensor, flags: Any) -> Tensor:
    """act(min(gate, limit)) * (clamp(up) + offset), SiLU with its alpha."""
    if flags.limit is not None:
        gate, up = gate.clamp(max=flags.limit), up.clamp(-flags.limit, flags.limit)
    if flags.activation == "silu":
        value = gate * torch.sigmoid(flags.alpha * gate)
    else:
        value = ACTIVATIONS[flags.activation](gate)
    result: Tensor = value * (up + flags.up_offset)
    return result


@dataclass(frozen=True, kw_only=True)
class RouterForm:
    """From router logits to the chosen experts and their weights."""

    score: str
    """``softmax``, ``sigmoid``, ``sqrt softplus``, ``logits``, ``sparsemixer``.

    Softmax renormalised is softmax over the chosen logits alone.
    """
    top_k: int
    choose_by: str = "scores"
    """``scores`` or ``logits``."""
    biased: bool = False
    """A bias is added for the choice only."""
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "top2"
    """A group's score: the sum of its best two (``top2``) or its best (``max``)."""
    dropped: float = -math.inf
    """What the scores outside the kept groups are set to."""
    renormalised: bool = False
    epsilon: float = 0.0
    scaling: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    beside: int = 0
    """The last logits are those of shared experts, whose scores take part in the sum of a renormalisation."""

    def words(self) -> str:
        """E.g. ``sigmoid, bias, 8 groups of which 4, top 8, renormalised, x 2.5``."""
        parts = [self.score + (" of capped logits" if self.softcap else "")]
        if self.biased:
            parts.append("selection bias")
        if self.groups > 1:
            parts.append(f"{self.groups} groups of which {self.kept_groups}")
        parts.append(f"top {self.top_k}")
        if self.renormalised:
            parts.append("renormalised" + (f" with {self.beside} shared" if self.beside else ""))
        if abs(self.scaling - 1) > 1e-6:
            parts.append(f"x {self.scaling:g}")
        return ", ".join(parts)


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: torch.softmax(z, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrt softplus": lambda z: F.softplus(z).sqrt(),
    "logits": lambda z: z,
}


def route_logits(logits: Tensor, form: RouterForm) -> Tensor:
    """Scale and cap of the logits."""
    logits = logits * form.logit_scale
    return form.softcap * torch.tanh(logits / form.softcap) if form.softcap else logits


def route_choice(logits: Tensor, bias: Tensor | None, form: RouterForm) -> Tensor:
    """Indices of the chosen experts, [N, top_k], best first."""
    z = route_logits(logits, form)
    if form.score == "sparsemixer":
        return sparse_mixer(z, form.epsilon)[0]
    z = z[:, : z.shape[-1] - form.beside]
    by = z if form.choose_by == "logits" else SCORES[form.score](z)
    if form.biased and bias is not None:
        by = by + bias
    if form.groups > 1:
        grouped = by.reshape(by.shape[0], form.groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = grouped.max(-1).values if form.group_score == "max" else best
        keep = torch.zeros_like(best, dtype=torch.bool)
        keep.scatter_(1, best.topk(form.kept_groups, dim=-1).indices, True)
        by = by.masked_fill(~keep.repeat_interleave(grouped.shape[-1], dim=-1), form.dropped)
    return by.topk(form.top_k, dim=-1).indices


def route_weights(logits: Tensor, index: Tensor, form: RouterForm) -> Tensor:
    """Weights of given choices, [N, K]."""
    z = route_logits(logits, form)
    if form.score == "sparsemixer":
        return sparse_mixer(z, form.epsilon)[1] * form.scaling
    scores = SCORES[form.score](z)
    weights = scores.gather(-1, index)
    if form.renormalised:
        total = weights.sum(-1, keepdim=True)
        if form.beside:
            total = total + scores[:, -form.beside :].sum(-1, keepdim=True)
        weights = weights / (total + form.epsilon)
    return weights * form.scaling


def sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """SparseMixer without its noise (Liu et al. 2024): twice the best, each weighted by a softmax over its near rivals.

    Returns:
        Indices and weights, [N, 2]. A rival's logit is within ``2 jitter`` of the best, relative to the larger size.
    """
    chosen: list[Tensor] = []
    weights: list[Tensor] = []
    left = logits
    for _ in range(2):
        with torch.no_grad():
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        gates = torch.softmax(left.masked_fill(far, -torch.inf), dim=-1)
        chosen.append(index)
        weights.append(gates.gather(-1, index))
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(chosen, -1), torch.cat(weights, -1)


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
    """Mamba's recurrence (Gu and Dao 2023, algorithm 2): h = e^{dt A} h + dt x B;  y = C h + D x.

    Args:
        x, dt: [B, E, T]; a: [E, N]; b, c: [B, N, T]; d: [E].
    """
    state = x.new_zeros(*x.shape[:2], a.shape[1])
    outputs = []
    for t in range(x.shape[-1]):
        step = dt[..., t, None]
        state = state * (step * a).exp() + step * x[..., t, None] * b[:, None, :, t]
        outputs.append((state * c[:, None, :, t]).sum(-1))
    y = torch.stack(outputs, dim=-1)
    return y if d is None else y + d[:, None] * x


def state_space_dual(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
    """Mamba-2's recurrence (Dao and Gu 2024, section 2): one decay a head, B and C shared by a group of heads.

    Args:
        x: [B, T, H, P]; dt: [B, T, H]; a: [H]; b, c: [B, T, G, N]; d: [H].
    """
    groups = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(groups, dim=2), c.repeat_interleave(groups, dim=2)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * a).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1))
    y = torch.stack(outputs, dim=1)
    return y if d is None else y + d[:, None] * x


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Lightning attention (Qin et al. 2024): S = e^{-decay} S + k v^T;  o = q S, one fixed decay a head.

    Args:
        q, k, v: [B, H, T, D]; decay: [H].
    """
    state = q.new_zeros(q.shape[0], q.shape[1], q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        state = state * torch.exp(-decay)[:, None, None] + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outputs, dim=2)


def linear_recurrence(x: Tensor, gate: Tensor, rate: Tensor, keep: Tensor) -> Tensor:
    """RG-LRU (De et al. 2024, equations 1 to 4): h = a h + sqrt(1 - a^2) (gate x);  a = e^{-8 softplus(rate) keep}.

    Args:
        x, gate, keep: [B, T, E], both gates already through their sigmoids; rate: [E].
    """
    log_a = -8.0 * keep * F.softplus(rate)
    state = x.new_zeros(x.shape[0], x.shape[2])
    outputs = []
    for t in range(x.shape[1]):
        a = log_a[:, t].exp()
        drive = gate[:, t] * x[:, t]
        state = drive if t == 0 else a * state + torch.sqrt(1 - a * a) * drive
        outputs.append(state)
    return torch.stack(outputs, dim=1)
