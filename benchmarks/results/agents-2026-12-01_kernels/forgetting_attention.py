"""Forgetting attention: s = scale * q k^T + G_i - G_j with G the running sum of g. A program owns a tile of queries
(forward, dq) or of keys (dk, dv); small programs sum the gates, one per head.

G is kept as an unevaluated sum of two float32 (hi + lo), so that G_i - G_j keeps its digits where G is large.
p = exp(s - top) / total, o = p v.  dv = p^T do, dp = do v^T, delta = rowsum(p * dp), ds = p * (dp - delta),
dq = scale * ds k, dk = scale * ds^T q, dG = rowsum(ds) - colsum(ds), dg_t = sum of dG from t on.
delta comes from the very dp that it is subtracted from: with a single key the difference is exactly zero.
"""

import math

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BM": 64, "BN": 64, "BS": 256, "num_warps": 4},
    {"BM": 128, "BN": 64, "BS": 256, "num_warps": 8},
    {"BM": 64, "BN": 32, "BS": 256, "num_warps": 4},
]
INTERPRETER = {"BM": 64, "BN": 64, "BS": 16, "num_warps": 1}


@triton.jit
def _add_pairs(a_hi, a_lo, b_hi, b_lo):
    s = a_hi + b_hi
    b = s - a_hi
    lost = (a_hi - (s - b)) + (b_hi - b)  # exactly what the sum of the high parts dropped
    lo = (a_lo + b_lo) + lost
    hi = s + lo
    return hi, lo - (hi - s)


@triton.jit
def _dot_wide(a, b, acc):
    # a is float32: its high and low halves in b's dtype are multiplied apart, so that a is not rounded to 8 bits
    high = a.to(b.dtype)
    acc = tl.dot(high, b, acc, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (a - high.to(tl.float32)).to(b.dtype)
        acc = tl.dot(low, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _gates(g_ptr, hi_ptr, lo_ptr, T, BS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * T
    n = tl.arange(0, BS)
    carry_hi = tl.zeros([1], dtype=tl.float32)
    carry_lo = tl.zeros([1], dtype=tl.float32)
    for start in range(0, T, BS):
        i = start + n
        g = tl.load(g_ptr + base + i, mask=i < T, other=0.0).to(tl.float32)
        hi, lo = tl.associative_scan((g, tl.zeros([BS], dtype=tl.float32)), 0, _add_pairs)
        hi, lo = _add_pairs(carry_hi, carry_lo, hi, lo)
        tl.store(hi_ptr + base + i, hi, mask=i < T)
        tl.store(lo_ptr + base + i, lo, mask=i < T)
        carry_hi = tl.sum(tl.where(n == BS - 1, hi, 0.0), 0, keep_dims=True)
        carry_lo = tl.sum(tl.where(n == BS - 1, lo, 0.0), 0, keep_dims=True)


@triton.jit
def _dgates(row_ptr, col_ptr, dg_ptr, T, BS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * T
    n = tl.arange(0, BS)
    carry_hi = tl.zeros([1], dtype=tl.float32)
    carry_lo = tl.zeros([1], dtype=tl.float32)
    for start in range(0, T, BS):
        i = T - 1 - (start + n)  # from the last to the first
        row = tl.load(row_ptr + base + i, mask=i >= 0, other=0.0)
        col = tl.load(col_ptr + base + i, mask=i >= 0, other=0.0)
        none = tl.zeros([BS], dtype=tl.float32)
        hi, lo = _add_pairs(row, none, -col, none)
        hi, lo = tl.associative_scan((hi, lo), 0, _add_pairs)
        hi, lo = _add_pairs(carry_hi, carry_lo, hi, lo)
        tl.store(dg_ptr + base + i, hi.to(dg_ptr.dtype.element_ty), mask=i >= 0)
        carry_hi = tl.sum(tl.where(n == BS - 1, hi, 0.0), 0, keep_dims=True)
        carry_lo = tl.sum(tl.where(n == BS - 1, lo, 0.0), 0, keep_dims=True)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, hi_ptr, lo_ptr, o_ptr, top_ptr, total_ptr, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (base + i)[:, None] * D + d[None, :], mask=inside, other=0.0)
    hi_i = tl.load(hi_ptr + base + i, mask=i < T, other=0.0)
    lo_i = tl.load(lo_ptr + base + i, mask=i < T, other=0.0)
    top = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    o = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(1) + 1) * BM), BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        hi_j = tl.load(hi_ptr + base + j, mask=j < T, other=0.0)
        lo_j = tl.load(lo_ptr + base + j, mask=j < T, other=0.0)
        gap = (hi_i[:, None] - hi_j[None, :]) + (lo_i[:, None] - lo_j[None, :])
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + gap
        s = tl.where((j[None, :] <= i[:, None]) & (j < T)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))  # finite from the first tile on: key 0 is seen by every row
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        o = _dot_wide(p, v, o * shrink[:, None])
        top = higher
    o = o / total[:, None]
    tl.store(o_ptr + (base + i)[:, None] * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(top_ptr + base + i, top, mask=i < T)
    tl.store(total_ptr + base + i, total, mask=i < T)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, hi_ptr, lo_ptr, do_ptr, top_ptr, total_ptr, delta_ptr, row_ptr, dq_ptr, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    do = tl.load(do_ptr + at_i, mask=inside, other=0.0)
    hi_i = tl.load(hi_ptr + base + i, mask=i < T, other=0.0)
    lo_i = tl.load(lo_ptr + base + i, mask=i < T, other=0.0)
    top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
    part = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
    end = tl.minimum(T, (tl.program_id(1) + 1) * BM)
    delta = tl.zeros([BM], dtype=tl.float32)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        hi_j = tl.load(hi_ptr + base + j, mask=j < T, other=0.0)
        lo_j = tl.load(lo_ptr + base + j, mask=j < T, other=0.0)
        gap = (hi_i[:, None] - hi_j[None, :]) + (lo_i[:, None] - lo_j[None, :])
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + gap
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        s = tl.where(seen, s - top[:, None], float("-inf"))
        p = tl.exp(s) * part[:, None]
        delta += tl.sum(p * tl.dot(do, tl.trans(v), input_precision="ieee"), 1)
    tl.store(delta_ptr + base + i, delta, mask=i < T)
    row = tl.zeros([BM], dtype=tl.float32)
    dq = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        hi_j = tl.load(hi_ptr + base + j, mask=j < T, other=0.0)
        lo_j = tl.load(lo_ptr + base + j, mask=j < T, other=0.0)
        gap = (hi_i[:, None] - hi_j[None, :]) + (lo_i[:, None] - lo_j[None, :])
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + gap
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        s = tl.where(seen, s - top[:, None], float("-inf"))
        p = tl.exp(s) * part[:, None]
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        row += tl.sum(ds, 1)
        dq = _dot_wide(ds, k, dq)
    tl.store(row_ptr + base + i, row, mask=i < T)
    tl.store(dq_ptr + at_i, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, hi_ptr, lo_ptr, do_ptr, top_ptr, total_ptr, delta_ptr, col_ptr, dk_ptr, dv_ptr, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * T
    first = tl.program_id(1) * BN
    j = first + tl.arange(0, BN)
    d = tl.arange(0, BD)
    there = (j < T)[:, None] & (d < D)[None, :]
    at_j = (base + j)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at_j, mask=there, other=0.0)
    v = tl.load(v_ptr + at_j, mask=there, other=0.0)
    hi_j = tl.load(hi_ptr + base + j, mask=j < T, other=0.0)
    lo_j = tl.load(lo_ptr + base + j, mask=j < T, other=0.0)
    col = tl.zeros([BN], dtype=tl.float32)
    dk = tl.zeros([BN, BD], dtype=tl.float32)
    dv = tl.zeros([BN, BD], dtype=tl.float32)
    for start in range((first // BM) * BM, T, BM):  # queries before the first key of the tile see none of it
        i = start + tl.arange(0, BM)
        inside = (i < T)[:, None] & (d < D)[None, :]
        at = (base + i)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        do = tl.load(do_ptr + at, mask=inside, other=0.0)
        hi_i = tl.load(hi_ptr + base + i, mask=i < T, other=0.0)
        lo_i = tl.load(lo_ptr + base + i, mask=i < T, other=0.0)
        top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
        part = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
        delta = tl.load(delta_ptr + base + i, mask=i < T, other=0.0)
        gap = (hi_i[:, None] - hi_j[None, :]) + (lo_i[:, None] - lo_j[None, :])
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + gap
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        s = tl.where(seen, s - top[:, None], float("-inf"))
        p = tl.exp(s) * part[:, None]
        dv = _dot_wide(tl.trans(p), do, dv)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
        col += tl.sum(ds, 0)
        dk = _dot_wide(tl.trans(ds), q, dk)
    tl.store(col_ptr + base + j, col, mask=j < T)
    tl.store(dk_ptr + at_j, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at_j, dv.to(dv_ptr.dtype.element_ty), mask=there)


def outputs_like(tensors, config):
    q = tensors["q"]
    saved = {
        "hi": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        "lo": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        "top": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        "total": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
    }
    return {"o": torch.empty_like(q)}, saved


def sizes(q, config):
    B, H, T, D = q.shape
    tiles = {"BM": config["BM"], "BN": config["BN"], "BD": max(16, triton.next_power_of_2(D))}
    return B * H, T, D, 1.0 / math.sqrt(D), tiles | {"num_warps": config["num_warps"]}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    q = tensors["q"]
    if q.numel() > 0:
        heads, T, D, scale, how = sizes(q, config)
        _gates[(heads,)](tensors["g"], saved["hi"], saved["lo"], T, BS=config["BS"], num_warps=1)
        _forward[(heads, triton.cdiv(T, config["BM"]))](
            q, tensors["k"], tensors["v"], saved["hi"], saved["lo"], outputs["o"], saved["top"], saved["total"],
            T, D, scale, **how
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v, g = tensors["q"], tensors["k"], tensors["v"], tensors["g"]
    found = {
        "q": torch.zeros_like(q),
        "k": torch.zeros_like(k),
        "v": torch.zeros_like(v),
        "g": torch.zeros_like(g),
    }
    do = grads["o"]
    if q.numel() > 0 and do is not None:
        heads, T, D, scale, how = sizes(q, config)
        delta = torch.empty_like(saved["top"])
        row = torch.empty_like(saved["top"])
        col = torch.empty_like(saved["top"])
        _dq[(heads, triton.cdiv(T, config["BM"]))](
            q, k, v, saved["hi"], saved["lo"], do, saved["top"], saved["total"], delta, row, found["q"],
            T, D, scale, **how
        )
        _dkv[(heads, triton.cdiv(T, config["BN"]))](
            q, k, v, saved["hi"], saved["lo"], do, saved["top"], saved["total"], delta, col, found["k"], found["v"],
            T, D, scale, **how
        )
        _dgates[(heads,)](row, col, found["g"], T, BS=config["BS"], num_warps=1)
    return {name: found[name] for name in needs}






FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable', 'g': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = '1a8dada6a01ba7fe'


def bucket(tensors):
    return {}
