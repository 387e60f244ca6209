"""Causal softmax attention on mixed values u = a v + (1 - a) v_first, a = sigmoid(share) for each head. A program owns a
tile of queries (forward, dq) or of keys (dk, dv, dv_first and its share of dshare).

s = scale * q k^T, p = exp(s - top) / total, o = p u. du = p^T do, dp = do u^T, ds = p ((dp - c) - D) with any number c for
each row and D = sum p (dp - c); c = rowsum(do * o) from the unrounded o makes D small, so that small differences keep
their digits; with a single key both are equal and ds is exactly zero. dq = scale * ds k, dk = scale * ds^T q, dv = a du,
dv_first = (1 - a) du, dshare = a (1 - a) sum du (v - v_first). The float32 operands p and ds are multiplied as a high and
a low part of the narrow dtype, so that they are not rounded.
"""

import math

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BM": 64, "BN": 64, "num_warps": 4},
    {"BM": 128, "BN": 64, "num_warps": 8},
    {"BM": 64, "BN": 32, "num_warps": 4},
]
INTERPRETER = {"BM": 64, "BN": 64, "num_warps": 1}


@triton.jit
def _dot_wide(a, b, acc):
    # a is float32: its high and low parts in b's dtype are multiplied apart, so that a is not rounded
    high = a.to(b.dtype)
    acc = tl.dot(high, b, acc, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (a - high.to(tl.float32)).to(b.dtype)
        acc = tl.dot(low, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _parts(share):
    # sigmoid and its complement, which is 0 where it is 0 in float64 too
    e = tl.exp(-tl.abs(share))
    part = tl.where(share >= 0.0, 1.0, e) / (1.0 + e)
    rest = tl.where(share >= 0.0, e, 1.0) / (1.0 + e)
    return part, tl.where(rest > 1.12e-16, rest, 0.0)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, early_ptr, share_ptr, o_ptr, wide_ptr, top_ptr, total_ptr, H, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0)
    base = head.to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    part, rest = _parts(tl.load(share_ptr + head % H).to(tl.float32))
    top = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    o = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(1) + 1) * BM), BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        early = tl.load(early_ptr + at, mask=there, other=0.0).to(tl.float32)
        u = (part * v + rest * early).to(k.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((j[None, :] <= i[:, None]) & (j < T)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))  # finite from the first tile on: key 0 is seen by every row
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        o = _dot_wide(p, u, o * shrink[:, None])
        top = higher
    o = o / total[:, None]
    tl.store(o_ptr + at_i, o.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(wide_ptr + at_i, o, mask=inside)
    tl.store(top_ptr + base + i, top, mask=i < T)
    tl.store(total_ptr + base + i, total, mask=i < T)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, early_ptr, share_ptr, wide_ptr, do_ptr, top_ptr, total_ptr, about_ptr, delta_ptr, dq_ptr,
    H, T, D, scale, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0)
    base = head.to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    do = tl.load(do_ptr + at_i, mask=inside, other=0.0)
    o = tl.load(wide_ptr + at_i, mask=inside, other=0.0)
    part, rest = _parts(tl.load(share_ptr + head % H).to(tl.float32))
    top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
    inverse = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
    about = tl.sum(do.to(tl.float32) * o, 1)
    delta = tl.zeros([BM], dtype=tl.float32)
    end = tl.minimum(T, (tl.program_id(1) + 1) * BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        early = tl.load(early_ptr + at, mask=there, other=0.0).to(tl.float32)
        u = (part * v + rest * early).to(k.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * inverse[:, None]
        delta += tl.sum(p * (tl.dot(do, tl.trans(u), input_precision="ieee") - about[:, None]), 1)
    tl.store(about_ptr + base + i, about, mask=i < T)
    tl.store(delta_ptr + base + i, delta, mask=i < T)
    dq = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        early = tl.load(early_ptr + at, mask=there, other=0.0).to(tl.float32)
        u = (part * v + rest * early).to(k.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * inverse[:, None]
        ds = p * ((tl.dot(do, tl.trans(u), input_precision="ieee") - about[:, None]) - delta[:, None])
        dq = _dot_wide(ds, k, dq)
    tl.store(dq_ptr + at_i, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, early_ptr, share_ptr, do_ptr, top_ptr, total_ptr, about_ptr, delta_ptr,
    dk_ptr, dv_ptr, dearly_ptr, dshare_ptr, H, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0)
    base = head.to(tl.int64) * T
    first = tl.program_id(1) * BN
    j = first + tl.arange(0, BN)
    d = tl.arange(0, BD)
    there = (j < T)[:, None] & (d < D)[None, :]
    at_j = (base + j)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at_j, mask=there, other=0.0)
    v = tl.load(v_ptr + at_j, mask=there, other=0.0).to(tl.float32)
    early = tl.load(early_ptr + at_j, mask=there, other=0.0).to(tl.float32)
    part, rest = _parts(tl.load(share_ptr + head % H).to(tl.float32))
    u = (part * v + rest * early).to(k.dtype)
    dk = tl.zeros([BN, BD], dtype=tl.float32)
    du = tl.zeros([BN, BD], dtype=tl.float32)
    for start in range((first // BM) * BM, T, BM):  # queries before the first key of the tile see none of it
        i = start + tl.arange(0, BM)
        inside = (i < T)[:, None] & (d < D)[None, :]
        at = (base + i)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        do = tl.load(do_ptr + at, mask=inside, other=0.0)
        top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
        inverse = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
        about = tl.load(about_ptr + base + i, mask=i < T, other=0.0)
        delta = tl.load(delta_ptr + base + i, mask=i < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * inverse[:, None]
        du = _dot_wide(tl.trans(p), do, du)
        ds = p * ((tl.dot(do, tl.trans(u), input_precision="ieee") - about[:, None]) - delta[:, None])
        dk = _dot_wide(tl.trans(ds), q, dk)
    tl.store(dk_ptr + at_j, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at_j, (part * du).to(dv_ptr.dtype.element_ty), mask=there)
    tl.store(dearly_ptr + at_j, (rest * du).to(dearly_ptr.dtype.element_ty), mask=there)
    given = part * rest * tl.sum(tl.sum(du * (v - early), 1), 0)
    place = (head // H) * tl.num_programs(1) + tl.program_id(1)
    tl.store(dshare_ptr + place.to(tl.int64) * H + head % H, given)


def outputs_like(tensors, config):
    q = tensors["q"]
    saved = {
        "wide": torch.empty(q.shape, dtype=torch.float32, device=q.device),  # o, not rounded
        "top": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        "total": torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
    }
    return {"o": torch.empty_like(q)}, saved


def sizes(q, config):
    B, H, T, D = q.shape
    tiles = {"BM": config["BM"], "BN": config["BN"], "BD": max(16, triton.next_power_of_2(D))}
    return B, H, T, D, 1.0 / math.sqrt(D), tiles | {"num_warps": config["num_warps"]}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    q = tensors["q"]
    if q.numel() > 0:
        B, H, T, D, scale, how = sizes(q, config)
        _forward[(B * H, triton.cdiv(T, config["BM"]))](
            q, tensors["k"], tensors["v"], tensors["v_first"], tensors["share"], outputs["o"], saved["wide"],
            saved["top"], saved["total"], H, T, D, scale, **how
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    early, share = tensors["v_first"], tensors["share"]
    found = {
        "q": torch.zeros_like(q),
        "k": torch.zeros_like(k),
        "v": torch.zeros_like(v),
        "v_first": torch.zeros_like(early),
        "share": torch.zeros_like(share),
    }
    do = grads["o"]
    if q.numel() > 0 and do is not None:
        B, H, T, D, scale, how = sizes(q, config)
        about, delta = torch.empty_like(saved["top"]), torch.empty_like(saved["top"])
        tiles = triton.cdiv(T, config["BN"])
        dshare = torch.empty((B * tiles, H), dtype=torch.float32, device=q.device)
        _dq[(B * H, triton.cdiv(T, config["BM"]))](
            q, k, v, early, share, saved["wide"], do, saved["top"], saved["total"], about, delta, found["q"],
            H, T, D, scale, **how
        )
        _dkv[(B * H, tiles)](
            q, k, v, early, share, do, saved["top"], saved["total"], about, delta,
            found["k"], found["v"], found["v_first"], dshare, H, T, D, scale, **how
        )
        found["share"] = dshare.sum(0).to(share.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable', 'v_first': 'differentiable', 'share': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = '5a12bc0cd066b888'


def bucket(tensors):
    return {}
