"""Stick-breaking attention. s = scale * q k^T, lb = log sigmoid(-s), w_ij = exp(log sigmoid(s_ij) + sum of lb_im over
j < m < i) for j < i, o = w v. A program owns a tile of queries (forward from the newest key to the oldest; dq from the
oldest to the newest) or of keys (dk, dv).

dv = w^T do, dw = do v^T, G = w dw, ds_ij = G_ij sigmoid(-s_ij) - sigmoid(s_ij) * (sum of G_im over m < j),
dq = scale * ds k, dk = scale * ds^T q. Sums over keys within a tile leave the own key out by a product with a strict
triangle of ones (nothing is subtracted again); what the tiles of newer keys (lb) and of older keys (G) add is kept for
each query and tile of keys: `newer` is saved by forward, `older` is written by dq for dk. The float32 operands of
products are multiplied as a high and a low part of the narrow dtype, so that they are not rounded.
"""

import math

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BM": 64, "BN": 64, "num_warps": 8},
    {"BM": 64, "BN": 32, "num_warps": 4},
    {"BM": 64, "BN": 64, "num_warps": 4},
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
def _soft(e):
    # log(1 + e) for 0 <= e <= 1 as 2 atanh(e / (2 + e))
    y = e / (2.0 + e)
    z = y * y
    tail = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0)))
    return 2.0 * y * (1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * tail))))


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, newer_ptr, T, D, NT, scale, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    base = head * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    later = (n[:, None] > n[None, :]).to(q.dtype)  # [m, j] = 1 where m is newer than j
    newer = tl.zeros([BM], dtype=tl.float32)
    o = tl.zeros([BM, BD], dtype=tl.float32)
    tiles = tl.cdiv(tl.minimum(T, (tl.program_id(1) + 1) * BM), BN)
    for back in range(0, tiles):
        block = tiles - 1 - back
        j = block * BN + n
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        earlier = (j[None, :] < i[:, None]) & (i < T)[:, None]
        soft = _soft(tl.exp(-tl.abs(s)))
        left = tl.where(earlier, tl.minimum(-s, 0.0) - soft, 0.0)
        between = _dot_wide(left, later, tl.zeros([BM, BN], dtype=tl.float32)) + newer[:, None]
        w = tl.where(earlier, tl.exp(tl.minimum(s, 0.0) - soft + between), 0.0)
        o = _dot_wide(w, v, o)
        tl.store(newer_ptr + (head * NT + block) * T + i, newer, mask=i < T)
        newer += tl.sum(left, 1)
    tl.store(o_ptr + at_i, o.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, do_ptr, newer_ptr, older_ptr, dq_ptr, T, D, NT, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    base = head * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    do = tl.load(do_ptr + at_i, mask=inside, other=0.0)
    later = (n[:, None] > n[None, :]).to(q.dtype)
    sooner = (n[:, None] < n[None, :]).to(q.dtype)  # [m, j] = 1 where m is older than j
    older = tl.zeros([BM], dtype=tl.float32)
    dq = tl.zeros([BM, BD], dtype=tl.float32)
    tiles = tl.cdiv(tl.minimum(T, (tl.program_id(1) + 1) * BM), BN)
    for block in range(0, tiles):
        j = block * BN + n
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        newer = tl.load(newer_ptr + (head * NT + block) * T + i, mask=i < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        earlier = (j[None, :] < i[:, None]) & (i < T)[:, None]
        e = tl.exp(-tl.abs(s))
        soft = _soft(e)
        left = tl.where(earlier, tl.minimum(-s, 0.0) - soft, 0.0)
        between = _dot_wide(left, later, tl.zeros([BM, BN], dtype=tl.float32)) + newer[:, None]
        w = tl.where(earlier, tl.exp(tl.minimum(s, 0.0) - soft + between), 0.0)
        g = w * tl.dot(do, tl.trans(v), input_precision="ieee")
        before = _dot_wide(g, sooner, tl.zeros([BM, BN], dtype=tl.float32)) + older[:, None]
        take = tl.where(s >= 0.0, 1.0, e) / (1.0 + e)  # sigmoid(s)
        leave = tl.where(s >= 0.0, e, 1.0) / (1.0 + e)
        ds = tl.where(earlier, g * leave - take * before, 0.0)
        dq = _dot_wide(ds, k, dq)
        tl.store(older_ptr + (head * NT + block) * T + i, older, mask=i < T)
        older += tl.sum(g, 1)
    tl.store(dq_ptr + at_i, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, do_ptr, newer_ptr, older_ptr, dk_ptr, dv_ptr, T, D, NT, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    base = head * T
    block = tl.program_id(1)
    first = block * BN
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    j = first + n
    there = (j < T)[:, None] & (d < D)[None, :]
    at_j = (base + j)[:, None] * D + d[None, :]
    k = tl.load(k_ptr + at_j, mask=there, other=0.0)
    v = tl.load(v_ptr + at_j, mask=there, other=0.0)
    later = (n[:, None] > n[None, :]).to(k.dtype)
    sooner = (n[:, None] < n[None, :]).to(k.dtype)
    dk = tl.zeros([BN, BD], dtype=tl.float32)
    dv = tl.zeros([BN, BD], dtype=tl.float32)
    for start in range((first // BM) * BM, T, BM):  # queries before the first key of the tile see none of it
        i = start + tl.arange(0, BM)
        inside = (i < T)[:, None] & (d < D)[None, :]
        at = (base + i)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
        do = tl.load(do_ptr + at, mask=inside, other=0.0)
        newer = tl.load(newer_ptr + (head * NT + block) * T + i, mask=i < T, other=0.0)
        older = tl.load(older_ptr + (head * NT + block) * T + i, mask=i < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        earlier = (j[None, :] < i[:, None]) & (i < T)[:, None]
        e = tl.exp(-tl.abs(s))
        soft = _soft(e)
        left = tl.where(earlier, tl.minimum(-s, 0.0) - soft, 0.0)
        between = _dot_wide(left, later, tl.zeros([BM, BN], dtype=tl.float32)) + newer[:, None]
        w = tl.where(earlier, tl.exp(tl.minimum(s, 0.0) - soft + between), 0.0)
        dv = _dot_wide(tl.trans(w), do, dv)
        g = w * tl.dot(do, tl.trans(v), input_precision="ieee")
        before = _dot_wide(g, sooner, tl.zeros([BM, BN], dtype=tl.float32)) + older[:, None]
        take = tl.where(s >= 0.0, 1.0, e) / (1.0 + e)
        leave = tl.where(s >= 0.0, e, 1.0) / (1.0 + e)
        ds = tl.where(earlier, g * leave - take * before, 0.0)
        dk = _dot_wide(tl.trans(ds), q, dk)
    tl.store(dk_ptr + at_j, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at_j, dv.to(dv_ptr.dtype.element_ty), mask=there)


def outputs_like(tensors, config):
    q = tensors["q"]
    B, H, T, D = q.shape
    newer = torch.empty((B, H, triton.cdiv(T, config["BN"]), T), dtype=torch.float32, device=q.device)
    return {"o": torch.empty_like(q)}, {"newer": newer}


def sizes(q, config):
    B, H, T, D = q.shape
    tiles = {"BM": config["BM"], "BN": config["BN"], "BD": max(16, triton.next_power_of_2(D))}
    return B * H, T, D, triton.cdiv(T, config["BN"]), 1.0 / math.sqrt(D), tiles | {"num_warps": config["num_warps"]}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    q = tensors["q"]
    if q.numel() > 0:
        heads, T, D, NT, scale, how = sizes(q, config)
        _forward[(heads, triton.cdiv(T, config["BM"]))](
            q, tensors["k"], tensors["v"], outputs["o"], saved["newer"], T, D, NT, scale, **how
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    found = {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": torch.zeros_like(v)}
    do = grads["o"]
    if q.numel() > 0 and do is not None:
        heads, T, D, NT, scale, how = sizes(q, config)
        older = torch.empty_like(saved["newer"])
        _dq[(heads, triton.cdiv(T, config["BM"]))](
            q, k, v, do, saved["newer"], older, found["q"], T, D, NT, scale, **how
        )
        _dkv[(heads, NT)](
            q, k, v, do, saved["newer"], older, found["k"], found["v"], T, D, NT, scale, **how
        )
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = 'f8daf5e8cba11ce7'


def bucket(tensors):
    return {}
