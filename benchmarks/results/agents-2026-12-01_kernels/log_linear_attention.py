"""Log-linear attention: A_ij = scale * q_i k_j * level[i, depth(i, j)] for j <= i, o = A v, depth the number of bits of
i xor j. A program owns a tile of queries (forward; dq and dlevel) or of keys (dk, dv) and walks the other side.

With s = scale * q k^T, w the gathered level, dA = do v^T: dv = A^T do, ds = dA w, dq = scale * ds k, dk = scale * ds^T q,
dlevel[i, l] = sum over the j of depth l of dA_ij s_ij. The float32 operands A and ds are multiplied as a high and a low
part of the narrow dtype, so that they are not rounded.
"""

import math

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BM": 64, "BN": 64, "num_warps": 4},
    {"BM": 64, "BN": 32, "num_warps": 4},
    {"BM": 32, "BN": 64, "num_warps": 4},
]
INTERPRETER = {"BM": 128, "BN": 128, "num_warps": 1}


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
def _depth(i, j):
    # the number of bits of i xor j, at most 9
    differ = i[:, None] ^ j[None, :]
    depth = (differ >= 1).to(tl.int32) + (differ >= 2).to(tl.int32) + (differ >= 4).to(tl.int32)
    depth += (differ >= 8).to(tl.int32) + (differ >= 16).to(tl.int32) + (differ >= 32).to(tl.int32)
    depth += (differ >= 64).to(tl.int32) + (differ >= 128).to(tl.int32) + (differ >= 256).to(tl.int32)
    return depth


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, level_ptr, o_ptr, T, D, L, scale, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    base = tl.program_id(0).to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    o = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(1) + 1) * BM), BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None]
        w = tl.load(level_ptr + ((base + i)[:, None] * L + _depth(i, j)), mask=seen, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        o = _dot_wide(tl.where(seen, s * w, 0.0), v, o)
    tl.store(o_ptr + at_i, o.to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, level_ptr, do_ptr, dq_ptr, dlevel_ptr, T, D, L, scale,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BL: tl.constexpr,
):
    base = tl.program_id(0).to(tl.int64) * T
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    column = tl.arange(0, BL)
    inside = (i < T)[:, None] & (d < D)[None, :]
    at_i = (base + i)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at_i, mask=inside, other=0.0)
    do = tl.load(do_ptr + at_i, mask=inside, other=0.0)
    dq = tl.zeros([BM, BD], dtype=tl.float32)
    dlevel = tl.zeros([BM, BL], dtype=tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(1) + 1) * BM), BN):
        j = start + tl.arange(0, BN)
        there = (j < T)[:, None] & (d < D)[None, :]
        at = (base + j)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None]
        depth = _depth(i, j)
        w = tl.load(level_ptr + ((base + i)[:, None] * L + depth), mask=seen, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        da = tl.dot(do, tl.trans(v), input_precision="ieee")
        dw = tl.where(seen, da * s, 0.0)
        for number in range(0, L):
            share = tl.sum(tl.where(depth == number, dw, 0.0), 1)
            dlevel += tl.where((column == number)[None, :], share[:, None], 0.0)
        dq = _dot_wide(tl.where(seen, da * w, 0.0), k, dq)
    tl.store(dq_ptr + at_i, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
    tl.store(
        dlevel_ptr + ((base + i)[:, None] * L + column[None, :]),
        dlevel.to(dlevel_ptr.dtype.element_ty),
        mask=(i < T)[:, None] & (column < L)[None, :],
    )


@triton.jit
def _dkv(
    q_ptr, k_ptr, v_ptr, level_ptr, do_ptr, dk_ptr, dv_ptr, T, D, L, scale,
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
        seen = (j[None, :] <= i[:, None]) & (i < T)[:, None]
        w = tl.load(level_ptr + ((base + i)[:, None] * L + _depth(i, j)), mask=seen, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        da = tl.dot(do, tl.trans(v), input_precision="ieee")
        dv = _dot_wide(tl.trans(tl.where(seen, s * w, 0.0)), do, dv)
        dk = _dot_wide(tl.trans(tl.where(seen, da * w, 0.0)), q, dk)
    tl.store(dk_ptr + at_j, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_ptr + at_j, dv.to(dv_ptr.dtype.element_ty), mask=there)


def outputs_like(tensors, config):
    return {"o": torch.empty_like(tensors["q"])}, {}


def sizes(q, config):
    B, H, T, D = q.shape
    tiles = {"BM": config["BM"], "BN": config["BN"], "BD": max(16, triton.next_power_of_2(D))}
    return B * H, T, D, 1.0 / math.sqrt(D), tiles | {"num_warps": config["num_warps"]}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    q, level = tensors["q"], tensors["level"]
    if q.numel() > 0:
        heads, T, D, scale, how = sizes(q, config)
        _forward[(heads, triton.cdiv(T, config["BM"]))](
            q, tensors["k"], tensors["v"], level, outputs["o"], T, D, level.shape[3], scale, **how
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v, level = tensors["q"], tensors["k"], tensors["v"], tensors["level"]
    found = {
        "q": torch.zeros_like(q),
        "k": torch.zeros_like(k),
        "v": torch.zeros_like(v),
        "level": torch.zeros_like(level),
    }
    do = grads["o"]
    if q.numel() > 0 and do is not None:
        heads, T, D, scale, how = sizes(q, config)
        L = level.shape[3]
        _dq[(heads, triton.cdiv(T, config["BM"]))](
            q, k, v, level, do, found["q"], found["level"], T, D, L, scale, BL=triton.next_power_of_2(L), **how
        )
        _dkv[(heads, triton.cdiv(T, config["BN"]))](
            q, k, v, level, do, found["k"], found["v"], T, D, L, scale, **how
        )
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable', 'level': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = '2c7af4ec81904aae'


def bucket(tensors):
    return {}
