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
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t, :, :, None].exp()
        new = v[:, t]
        if beta is not None:
            new = (new - torch.einsum("nhkv,nhk->nhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
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
    q, k, v = (_chunked(x, chunk) for x in (q, k, v))
    g = torch.zeros_like(k) if g is None else _chunked(g.expand(*g.shape[:-1], k.shape[-1]), chunk).clamp_min(-104.0)
    past = g.flip(-2).cumsum(-2).flip(-2) - g
    per_row = spec.decay != "channel"
    if per_row:
        # the rows of the products are scaled in fp32, the operands are q and k themselves
        q_decayed, k_decayed, k_ending = (rounded(x, mma_dtype, keep) for x in (q, k, k))
        rise, end = g.cumsum(-2).exp()[..., :1], past.exp()[..., :1]
    else:
        q_decayed = rounded(q * g.cumsum(-2).exp(), mma_dtype, keep)
        k_decayed = rounded(k * g.cumsum(-2).exp(), mma_dtype, keep)
        k_ending = rounded(k * past.exp(), mma_dtype, keep)
        rise = end = torch.ones_like(g[..., :1])
    qk, kk = (_per_row_grams if per_row else _channel_grams)(q, k, g, mma_dtype)
    own = torch.diag_embed((q * k).sum(-1))
    scores = rounded(qk, mma_dtype) + rounded(own, mma_dtype, keep)
    if beta is not None:
        beta = _chunked(beta[..., None], chunk)
        lower = rounded(kk, keep, mma_dtype) * beta
        identity = torch.eye(chunk, dtype=keep, device=q.device)
        inverse = torch.linalg.solve_triangular(identity + lower, identity, upper=False, unitriangular=True)
        solve = rounded(inverse * beta.transpose(-1, -2), mma_dtype, keep)
    outputs = []
    for c in range(count):
        narrow = rounded(state, mma_dtype, keep)
        new = v[:, :, c]
        if beta is not None:
            known = rise[:, :, c] * (k_decayed[:, :, c] @ narrow)
            new = solve[:, :, c] @ rounded(new - known, mma_dtype)
        new = rounded(new, mma_dtype)
        outputs.append(rise[:, :, c] * (q_decayed[:, :, c] @ narrow) + scores[:, :, c] @ new)
        scaled = rounded(new * end[:, :, c], mma_dtype, keep) if per_row else new
        step = rounded(k_ending[:, :, c].transpose(-1, -2) @ scaled, keep, mma_dtype)
        state = state * g[:, :, c].sum(-2).exp()[..., None] + step
    o = torch.cat(outputs, dim=2).transpose(1, 2)[:, :length] if outputs else v.flatten(2, 3).transpose(1, 2)
    return {"o": rounded(_unpacked(o, tensors), mma_dtype, keep), "final_state": state}


def leaf_rows(dtype: torch.dtype) -> int:
    """Rows of a block whose decays the kernels take relative to its middle row; see the template."""
    if dtype == torch.bfloat16:
        return 16
    return 8 if dtype == torch.float32 else 1


# ---- both forms ----------------------------------------------------------------------------------------------------


def _given(tensors: dict[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    if tensor is None:
        raise ValueError(f"linear attention needs {name}")
    return tensor


def _sequences(
    tensors: dict[str, Tensor | None], spec: Spec, dtype: torch.dtype, gradient_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """q (normed, scaled), k (normed), v, g [N, T, HV, K or 1], beta [N, T, HV] and the first state, all in ``dtype``.

    With ``gradient_dtype`` the gradients of q, k, v and beta are rounded as the kernels store them.
    """
    q, k, v = (_given(tensors, name).to(dtype) for name in ("q", "k", "v"))
    g = _given(tensors, "g").to(dtype) if spec.decay != "none" else None
    beta = _given(tensors, "beta").to(dtype) if spec.delta else None
    if gradient_dtype is not None:
        q, k, v = (rounded(x, dtype, gradient_dtype) for x in (q, k, v))
        if beta is not None:
            beta = rounded(beta, dtype, gradient_dtype)
    if spec.qk_l2norm:
        q, k = (x / ((x * x).sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    q = q * (spec.scale if spec.scale is not None else q.shape[-1] ** -0.5)
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
    steps = g[..., :1].expand(*g.shape[:-1], g.shape[-2]).masked_fill(~mask, 0.0)
    between = steps.cumsum(-2).exp().masked_fill(~mask, 0.0)
    q, k = rounded(q, mma_dtype, torch.float32), rounded(k, mma_dtype, torch.float32)
    return q @ k.transpose(-1, -2) * between, k @ k.transpose(-1, -2) * between


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
        factor = torch.where(upper[:, None], through, past).exp()
        mask = (i[:, None] // (2 * half) == i // (2 * half)) & upper[:, None] & ~upper
        qk, kk = _add_grams(qk, kk, q * factor, k * factor, k * factor, mask, mma_dtype)
        half //= 2
    if leaf > 1:
        segments = g.clamp_min(-160.0 / leaf).reshape(*g.shape[:-2], rows // leaf, leaf, g.shape[-1])
        through = segments.cumsum(-2)
        decay = (through - through[..., leaf // 2, None, :]).flatten(-3, -2)
        mask = (i[:, None] // leaf == i // leaf) & (i[:, None] > i)
        qk, kk = _add_grams(qk, kk, q * decay.exp(), k * decay.exp(), k * (-decay).exp(), mask, mma_dtype)
    return qk, kk


def _add_grams(
    qk: Tensor, kk: Tensor, q: Tensor, k_near: Tensor, k_far: Tensor, mask: Tensor, mma_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both grams with the products of these factors added where ``mask`` holds."""
    q, k_near, k_far = (rounded(x, mma_dtype, torch.float32) for x in (q, k_near, k_far))
    far = k_far.transpose(-1, -2)
    return qk + (q @ far).masked_fill(~mask, 0.0), kk + (k_near @ far).masked_fill(~mask, 0.0)
