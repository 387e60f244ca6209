"""Linear attention with a decayed matrix state, in plain torch: the recurrence, and the chunked form with rounding.

Shapes as in :class:`kernel_templates.linear_attention.spec.Spec`. Packed sequences are laid side by side on the
batch axis and padded with tokens that leave the state alone (k = 0, g = 0, beta = 0).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from kernel_templates.linear_attention.spec import Spec
from kernel_templates.rounding import rounded

L2NORM_EPS = 1e-6


def reference(tensors: dict[str, Tensor | None], spec: Spec) -> dict[str, Tensor]:
    """The recurrence, token by token, in the dtype of ``q``; differentiable.

    S' = Diag(e^g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, or S' + k_t v_t^T without the delta rule;
    o_t = scale S_t^T q_t. Sources: Yang et al., "Gated Delta Networks" (2024), equation 10; Kimi Team, "Kimi Linear"
    (2025), section 3.

    Returns:
        o [B, T, HV, V] and final_state [N, HV, K, V], both in the dtype of ``q``.
    """
    q, k, v, g, beta, state = _sequences(tensors, spec, _given(tensors, "q").dtype)
    q_factor, k_factor = _factors(q, k, spec)
    q, k = q * q_factor * _scale(q, spec), k * k_factor
    outputs = []
    # cut into tokens once: the gradient of x[:, t] is a tensor of zeros as large as x, for every t
    decay = g.exp()[..., None].unbind(1) if g is not None else ()
    beta_t = beta[..., None, None].unbind(1) if beta is not None else ()
    tokens = zip(q[..., None, :].unbind(1), k.unbind(1), v[..., None, :].unbind(1), strict=True)
    for t, (q_row, k_t, new) in enumerate(tokens):
        if decay:
            state = state * decay[t]
        if beta_t:
            new = (new - k_t[..., None, :] @ state) * beta_t[t]
        state = state + k_t[..., None] * new
        outputs.append((q_row @ state).squeeze(-2))
    o = torch.stack(outputs, dim=1) if outputs else v
    return {"o": _unpacked(o, tensors), "final_state": state}


def rounded_reference(
    tensors: dict[str, Tensor | None], spec: Spec, mma_dtype: torch.dtype, config: dict[str, Any]
) -> dict[str, Tensor]:
    """The chunked algorithm of the kernels in fp32, every operand of a matrix product rounded to ``mma_dtype``.

    Rounded where the kernels round: decayed q and k, scores, solve, states between chunks, corrected values; in
    backward the gradients of scores, of values and of states. Decays, sums and the diagonal of the scores stay fp32.

    Args:
        config: the kernels' configuration; ``chunk`` is read, 64 without it.
    """
    chunk = int(config.get("chunk", 64))
    keep = torch.float32
    q, k, v, g, beta, state = _sequences(tensors, spec, torch.float32, mma_dtype)
    length = v.shape[1]
    count = -(-length // chunk)
    raw_q, raw_k, v = (_chunked(x, chunk) for x in (q, k, v))
    scale = _scale(q, spec)
    q_factor, k_factor = _factors(raw_q, raw_k, spec)
    q, k = raw_q * q_factor, raw_k * k_factor
    g = torch.zeros_like(k) if g is None else _chunked(g.expand(*g.shape[:-1], k.shape[-1]), chunk).clamp_min(-104.0)
    through, past = g.cumsum(-2), g.flip(-2).cumsum(-2).flip(-2) - g
    per_row = spec.decay != "channel"
    if per_row:
        # q and k themselves are the operands; the rows of the products are scaled in fp32
        q_decayed, k_decayed, k_ending = raw_q, raw_k, raw_k
        rise, end = through.exp()[..., :1], past.exp()[..., :1] * k_factor
        q_rise, k_rise = rise * q_factor * scale, rise * k_factor
    else:
        q_decayed = rounded(q * through.exp() * scale, mma_dtype, keep)
        k_decayed = rounded(k * through.exp(), mma_dtype, keep)
        k_ending = rounded(k * past.exp(), mma_dtype, keep)
        q_rise = k_rise = end = torch.ones_like(g[..., :1])
    qk, kk = (_per_row_grams if per_row else _channel_grams)(q, k, g, mma_dtype)
    own = torch.diag_embed((q * k).sum(-1))
    if not per_row:
        qk, kk = rounded(qk, keep, mma_dtype), rounded(kk, keep, mma_dtype)
    scores = rounded((qk + own) * scale, mma_dtype, keep)
    if beta is not None:
        beta = _chunked(beta[..., None], chunk)
    outputs = []
    for c in range(count):
        narrow = rounded(state, mma_dtype, keep)
        new = v[:, :, c]
        if beta is not None:
            known = k_rise[:, :, c] * rounded(k_decayed[:, :, c] @ narrow, keep, mma_dtype)
            seen = rounded(new - known, mma_dtype, keep)
            new = _Solve.apply(kk[:, :, c], beta[:, :, c], seen, mma_dtype)  # type: ignore[no-untyped-call]
        new = rounded(new, keep, mma_dtype)
        ending = _Ending.apply(new, end[:, :, c], mma_dtype)  # type: ignore[no-untyped-call]
        new = rounded(new, mma_dtype, keep)
        past_o = q_rise[:, :, c] * rounded(q_decayed[:, :, c] @ narrow, keep, mma_dtype)
        outputs.append(past_o + scores[:, :, c] @ new)
        step = rounded(k_ending[:, :, c].transpose(-1, -2) @ (ending if per_row else new), keep, mma_dtype)
        state = _Carried.apply(state, g[:, :, c].sum(-2), mma_dtype) + step  # type: ignore[no-untyped-call]
    o = torch.cat(outputs, dim=2).transpose(1, 2)[:, :length] if outputs else v.flatten(2, 3).transpose(1, 2)
    return {"o": rounded(_unpacked(o, tensors), mma_dtype, keep), "final_state": state}


def leaf_rows(dtype: torch.dtype) -> int:
    """Rows of a block whose decays the kernels take relative to its middle row; see the template."""
    return 16 if dtype == torch.bfloat16 else 1


# ---- both forms ----------------------------------------------------------------------------------------------------


def _given(tensors: dict[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor is None:
        raise ValueError(f"linear attention needs {name}")
    return tensor


def _sequences(
    tensors: dict[str, Tensor | None], spec: Spec, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """q, k, v, g [N, T, HV, K or 1], beta [N, T, HV] and the first state, all in ``dtype``.

    With ``gradient_dtype`` the gradients of q, k, v and beta are rounded as the kernels store them.
    """
    q, k, v = (_given(tensors, name).to(dtype) for name in ("q", "k", "v"))
    g = _given(tensors, "g").to(dtype) if spec.decay != "none" else None
    beta = _given(tensors, "beta").to(dtype) if spec.delta else None
    if gradient_dtype is not None:
        q, k, v = (rounded(x, dtype, gradient_dtype) for x in (q, k, v))
        if beta is not None:
            beta = rounded(beta, dtype, gradient_dtype)
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    if g is not None and spec.decay == "head":
        g = g[..., None]
    cu_seqlens = tensors.get("cu_seqlens")
    if cu_seqlens is not None:
        q, k, v = (_padded(x, cu_seqlens) for x in (q, k, v))
        g = None if g is None else _padded(g, cu_seqlens)
        beta = None if beta is None else _padded(beta, cu_seqlens)
    state = tensors.get("initial_state")
    if state is None:
        state = v.new_zeros((v.shape[0], heads, q.shape[-1], v.shape[-1]))
    state = state.to(dtype)
    if v.shape[1] == 0:
        # no token touches the inputs; sums of nothing give their gradients all the same
        v = v + q.sum() + (0.0 if g is None else g.sum()) + (0.0 if beta is None else beta.sum())
        state = state + k.sum() + v.sum()
    return q, k, v, g, beta, state


def _scale(q: Tensor, spec: Spec) -> float:
    return spec.scale if spec.scale is not None else float(q.shape[-1] ** -0.5)


def _factors(q: Tensor, k: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """One over the norms of the rows of q and k [..., K], or one [..., 1]."""
    if not spec.qk_l2norm:
        return torch.ones_like(q[..., :1]), torch.ones_like(k[..., :1])
    q_norm, k_norm = (((x * x).sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    return 1.0 / q_norm, 1.0 / k_norm


def _padded(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Packed tokens [1, T, ...] as [N, longest, ...], zeros past each sequence's end."""
    bounds = cu_seqlens.tolist()
    longest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    rows = [
        torch.cat((x[0, a:b], x.new_zeros((longest - (b - a), *x.shape[2:])))) for a, b in itertools.pairwise(bounds)
    ]
    return torch.stack(rows)


def _unpacked(o: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
    """[N, longest, HV, V] back to packed tokens [1, T, HV, V]; unchanged without packing."""
    cu_seqlens = tensors.get("cu_seqlens")
    if cu_seqlens is None:
        return o
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    return torch.cat([o[n, :length] for n, length in enumerate(lengths)])[None]


class _Solve(torch.autograd.Function):
    """V' = (I + Diag(beta) L)^-1 Diag(beta) r of one chunk, with the backward that the kernels use.

    dr = dv = M^T dV', dL = -stril(dv V'^T) and dbeta = rowsum(dv V') / beta^2, all from dv and V' as they are stored.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor, beta: Tensor, r: Tensor, mma_dtype: torch.dtype) -> Tensor:
        beta = torch.where(beta.abs() < _smallest_beta(mma_dtype), _smallest_beta(mma_dtype), beta)
        identity = torch.eye(r.shape[-2], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(identity + lower * beta, identity, upper=False, unitriangular=True)
        solve = rounded(inverse * beta.transpose(-1, -2), mma_dtype)
        new = solve @ r
        ctx.save_for_backward(beta, solve, new)
        ctx.mma_dtype = mma_dtype
        return new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        beta, solve, new = ctx.saved_tensors
        dv = rounded(solve.transpose(-1, -2) @ grads[0], ctx.mma_dtype)
        new = rounded(new, ctx.mma_dtype)
        d_lower = rounded(-(dv @ new.transpose(-1, -2)).tril(-1), ctx.mma_dtype)
        return d_lower, (dv * new).sum(-1, keepdim=True) / beta / beta, dv, None


class _Ending(torch.autograd.Function):
    """V' times its rows' decay to the end of the chunk, whose gradient is formed from V' as it is stored."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, end: Tensor, mma_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rounded(new, mma_dtype), end)
        return rounded(new * end, mma_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        stored, end = ctx.saved_tensors
        return grads[0] * end, (grads[0] * stored).sum(-1, keepdim=True), None


class _Carried(torch.autograd.Function):
    """e^G S; the gradient of G is rowsum(S dS), of S and dS as they are stored."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, log_decay: Tensor, mma_dtype: torch.dtype) -> Tensor:
        carried = state * log_decay.exp()[..., None]
        ctx.save_for_backward(state, log_decay)
        ctx.mma_dtype = mma_dtype
        return carried

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        state, log_decay = ctx.saved_tensors
        decay = log_decay.exp()
        stored = rounded(state, ctx.mma_dtype) * rounded(grads[0], ctx.mma_dtype)
        return grads[0] * decay[..., None], decay * stored.sum(-1), None


class _Decayed(torch.autograd.Function):
    """x e^a as the operand of a product; the gradient of a is formed from the rounded operand, as in the kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, mma_dtype: torch.dtype) -> Tensor:
        operand = rounded(x * a.exp(), mma_dtype)
        ctx.save_for_backward(a, operand)
        return operand

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        a, operand = ctx.saved_tensors
        return grads[0] * a.exp(), grads[0] * operand, None


class _Between(torch.autograd.Function):
    """A gram times e^a, the decay between its rows; its gradient is rounded with the decay in it, and then used."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor, a: Tensor, mask: Tensor, mma_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(gram, a, mask)
        ctx.mma_dtype = mma_dtype
        return gram * torch.where(mask, a.exp(), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gram, a, mask = ctx.saved_tensors
        grad = rounded(grads[0] * torch.where(mask, a.exp(), 0.0), ctx.mma_dtype)
        return grad, grad * gram, None, None


def _smallest_beta(dtype: torch.dtype) -> float:
    """What the kernels compute a beta of 0 as; see the template."""
    return float(2.0**-13) if dtype == torch.float16 else 1e-15


# ---- the chunked form ----------------------------------------------------------------------------------------------


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """[N, T, H, D] as [N, H, chunks, chunk, D], zeros past the last token."""
    n, length, heads, dim = x.shape
    count = -(-length // chunk)
    x = torch.cat((x, x.new_zeros((n, count * chunk - length, heads, dim))), dim=1)
    return x.reshape(n, count, chunk, heads, dim).permute(0, 3, 1, 2, 4)


def _per_row_grams(q: Tensor, k: Tensor, g: Tensor, mma_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q k^T and k k^T strictly below the diagonal, times the decay between rows (the same in every channel)."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril(-1)
    between = g[..., :1].expand(*g.shape[:-1], g.shape[-2]).masked_fill(~mask, 0.0).cumsum(-2)
    q, k = rounded(q, mma_dtype, torch.float32), rounded(k, mma_dtype, torch.float32)
    qk, kk = q @ k.transpose(-1, -2), k @ k.transpose(-1, -2)
    apply = _Between.apply
    return apply(qk, between, mask, mma_dtype), apply(kk, between, mask, mma_dtype)  # type: ignore[no-untyped-call]


def _channel_grams(q: Tensor, k: Tensor, g: Tensor, mma_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q k^T and k k^T strictly below the diagonal, each channel times its decay between the rows.

    Halves of blocks relative to their boundary down to the leaves, those relative to their middle row: the kernels'
    own cut, so that the same factors are rounded.
    """
    rows = q.shape[-2]
    leaf = min(leaf_rows(mma_dtype), rows)
    i = torch.arange(rows, device=q.device)
    qk = q.new_zeros((*q.shape[:-1], rows))
    kk = torch.zeros_like(qk)
    half = rows // 2
    while half >= leaf:
        segments = g.reshape(*g.shape[:-2], rows // half, half, g.shape[-1])
        through = segments.cumsum(-2).flatten(-3, -2)
        past = (segments.flip(-2).cumsum(-2).flip(-2) - segments).flatten(-3, -2)
        upper = (i // half) % 2 == 1
        factor = torch.where(upper[:, None], through, past)
        mask = (i[:, None] // (2 * half) == i // (2 * half)) & upper[:, None] & ~upper
        qk, kk = _add_grams(qk, kk, q, k, factor, factor, mask, mma_dtype)
        half //= 2
    if leaf > 1:
        segments = g.clamp_min(-160.0 / leaf).reshape(*g.shape[:-2], rows // leaf, leaf, g.shape[-1])
        through = segments.cumsum(-2)
        decay = (through - through[..., leaf // 2, None, :]).flatten(-3, -2)
        mask = (i[:, None] // leaf == i // leaf) & (i[:, None] > i)
        qk, kk = _add_grams(qk, kk, q, k, decay, -decay, mask, mma_dtype)
    return qk, kk


def _add_grams(
    qk: Tensor, kk: Tensor, q: Tensor, k: Tensor, rise: Tensor, fall: Tensor, mask: Tensor, mma_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both grams with the products added where ``mask`` holds, whose pairs decay by e^(rise_i + fall_j)."""
    operand = _Decayed.apply
    far = operand(k, fall, mma_dtype).transpose(-1, -2)  # type: ignore[no-untyped-call]
    near_q, near_k = operand(q, rise, mma_dtype), operand(k, rise, mma_dtype)  # type: ignore[no-untyped-call]
    return qk + (near_q @ far).masked_fill(~mask, 0.0), kk + (near_k @ far).masked_fill(~mask, 0.0)
