"""Causal attention with capped scores and a sink. s = 30 tanh(x / 30), x = scale * q k^T; the softmax runs over the keys
and the head's sink. A program owns a tile of queries (forward, dq and its share of dsink) or of keys (dk, dv).

p = exp(s - top) / total, p0 = exp(sink - top) / total, o = p v. dv = p^T do, dp = do v^T; the sink's dp is 0.
With any number c for each row, D = sum p (dp - c) - p0 c gives ds = p ((dp - c) - D) and dsink = p0 (-c - D);
c = rowsum(do * o) is the sum itself but for rounding, so that D only mends the rounding and small differences keep their
digits. dx = ds (1 - tanh^2), dq = scale * dx k, dk = scale * dx^T q. The float32 operands p and dx are multiplied as a
high and a low part of the narrow dtype, so that they are not rounded.
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
def _cap(x):
    # 30 tanh(x / 30) and its slope, both without cancellation
    z = x * (1.0 / 30.0)
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(z < 0.0, -far, far)
    y = tl.minimum(z * z, 0.0625)
    series = 1.0 + y * (-0.33333333333 + y * (0.13333333333 + y * (-0.05396825397 + y * 0.02186948854)))
    t = tl.where(tl.abs(z) < 0.25, z * series, far)
    # 0 where tanh is 1 in float64 too
    slope = tl.where(e > 2.75e-17, 4.0 * e / ((1.0 + e) * (1.0 + e)), 0.0)
    return 30.0 * t, slope


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, wide_ptr, top_ptr, total_ptr, H, T, D, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0)
    base = head.to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + (base + i)[:, None] * D + d[None, :], mask=inside, other=0.0)
    sink = tl.load(sink_ptr + head % H).to(tl.float32)
    top = tl.zeros([BM], dtype=tl.float32) + sink
    total = tl.full([BM], 1.0, dtype=tl.float32)
    o = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(1) + 1) * BM), BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        s, slope = _cap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale)
        s = tl.where((j[None, :] <= i[:, None]) & (j < T)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        o = _dot_wide(p, v, o * shrink[:, None])
        top = higher
    o = o / total[:, None]
    tl.store(o_ptr + (base + i)[:, None] * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(wide_ptr + (base + i)[:, None] * D + d[None, :], o, mask=inside)
    tl.store(top_ptr + base + i, top, mask=i < T)
    tl.store(total_ptr + base + i, total, mask=i < T)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, sink_ptr, wide_ptr, do_ptr, top_ptr, total_ptr, about_ptr, delta_ptr, dq_ptr, dsink_ptr,
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
    sink = tl.load(sink_ptr + head % H).to(tl.float32)
    top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
    part = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
    nothing = tl.exp(tl.where(i < T, sink - top, float("-inf"))) * part  # the sink's weight
    about = tl.sum(do.to(tl.float32) * o, 1)
    delta = -nothing * about
    end = tl.minimum(T, (tl.program_id(1) + 1) * BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        s, slope = _cap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale)
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * part[:, None]
        delta += tl.sum(p * (tl.dot(do, tl.trans(v), input_precision="ieee") - about[:, None]), 1)
    tl.store(about_ptr + base + i, about, mask=i < T)
    tl.store(delta_ptr + base + i, delta, mask=i < T)
    dq = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        s, slope = _cap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale)
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * part[:, None]
        ds = p * ((tl.dot(do, tl.trans(v), input_precision="ieee") - about[:, None]) - delta[:, None])
        dq = _dot_wide(ds * slope, k, dq)
    tl.store(dq_ptr + at_i, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    share = tl.sum(nothing * (-about - delta), 0)
    place = (head // H) * tl.num_programs(1) + tl.program_id(1)
    tl.store(dsink_ptr + place.to(tl.int64) * H + head % H, share)


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, do_ptr, top_ptr, total_ptr, about_ptr, delta_ptr, dk_ptr, dv_ptr, T, D, scale,
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
    dk = tl.zeros([BN, BD], dtype=tl.float32)
    dv = tl.zeros([BN, BD], dtype=tl.float32)
    for start in range((first // BM) * BM, T, BM):  # queries before the first key of the tile see none of it
        i = start + tl.arange(0, BM)
        inside = (i < T)[:, None] & (d < D)[None, :]
        at = (base + i)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        do = tl.load(do_ptr + at, mask=inside, other=0.0)
        top = tl.load(top_ptr + base + i, mask=i < T, other=0.0)
        part = 1.0 / tl.load(total_ptr + base + i, mask=i < T, other=1.0)
        about = tl.load(about_ptr + base + i, mask=i < T, other=0.0)
        delta = tl.load(delta_ptr + base + i, mask=i < T, other=0.0)
        s, slope = _cap(tl.dot(q, tl.trans(k), input_precision="ieee") * scale)
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None] & (j < T)[None, :]
        p = tl.exp(tl.where(seen, s - top[:, None], float("-inf"))) * part[:, None]
        dv = _dot_wide(tl.trans(p), do, dv)
        ds = p * ((tl.dot(do, tl.trans(v), input_precision="ieee") - about[:, None]) - delta[:, None])
        dk = _dot_wide(tl.trans(ds * slope), q, dk)
    tl.store(dk_ptr + at_j, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at_j, dv.to(dv_ptr.dtype.element_ty), mask=there)


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
            q, tensors["k"], tensors["v"], tensors["sink"], outputs["o"], saved["wide"],
            saved["top"], saved["total"], H, T, D, scale, **how
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v, sink = tensors["q"], tensors["k"], tensors["v"], tensors["sink"]
    found = {
        "q": torch.zeros_like(q),
        "k": torch.zeros_like(k),
        "v": torch.zeros_like(v),
        "sink": torch.zeros_like(sink),
    }
    do = grads["o"]
    if q.numel() > 0 and do is not None:
        B, H, T, D, scale, how = sizes(q, config)
        about, delta = torch.empty_like(saved["top"]), torch.empty_like(saved["top"])
        tiles = triton.cdiv(T, config["BM"])
        dsink = torch.empty((B * tiles, H), dtype=torch.float32, device=q.device)
        _dq[(B * H, tiles)](
            q, k, v, sink, saved["wide"], do, saved["top"], saved["total"], about, delta, found["q"], dsink,
            H, T, D, scale, **how
        )
        _dkv[(B * H, triton.cdiv(T, config["BN"]))](
            q, k, v, do, saved["top"], saved["total"], about, delta, found["k"], found["v"], T, D, scale, **how
        )
        found["sink"] = dsink.sum(0).to(sink.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable', 'sink': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = 'db6757013a10be88'


def bucket(tensors):
    return {}
