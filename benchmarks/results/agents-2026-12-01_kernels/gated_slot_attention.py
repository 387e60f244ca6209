"""Gated slot attention. Slots of the key memory are independent until the softmax, channels of the value memory after it:
  1. a program owns some slots of one head's keys, walks time and writes the scores;  2. softmax over slots, row by row;
  3. a program owns some channels of one head's values, walks time and writes o.
Backward goes 3, 2, 1. Both walks keep the memory before every STEPS steps in forward; backward goes over these stretches
from the last to the first, computes a stretch's states again into scratch memory of its own, then walks it back.

With c = 1 - exp(g): S_t = S_{t-1} + c (x_t - S_{t-1}); E_t = (gradient of S_t from step t) + (1 - c_{t+1}) E_{t+1},
dx_t = sum over slots of c E_t, dg_t = exp(g) <E_t, S_{t-1} - x_t> for each slot.
Values: step gradient w do^T, dw = S do. Scores: dl = w (dw - <w, dw>). Keys: step gradient dl q^T, dq = S^T dl.
"""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"ROWS": 16, "COLS": 16, "STEPS": 64, "LINES": 32, "num_warps": 4},
    {"ROWS": 16, "COLS": 16, "STEPS": 32, "LINES": 32, "num_warps": 2},
    {"ROWS": 32, "COLS": 32, "STEPS": 64, "LINES": 32, "num_warps": 4},
]
INTERPRETER = {"ROWS": 64, "COLS": 64, "STEPS": 64, "LINES": 256, "num_warps": 1}


@triton.jit
def _drop(g):
    # 1 - exp(g), by its series where the difference would lose digits
    series = 1.0 + g * (1.0 / 6.0) * (1.0 + g * (1.0 / 7.0))
    series = 1.0 + g * (1.0 / 4.0) * (1.0 + g * (1.0 / 5.0) * series)
    series = 1.0 + g * (1.0 / 2.0) * (1.0 + g * (1.0 / 3.0) * series)
    return tl.where(tl.abs(g) < 0.25, -g * series, 1.0 - tl.exp(g))


@triton.jit
def _keys(
    q_ptr, k_ptr, g_ptr, scores_ptr, kept_ptr, T, D, M, N, STEPS, ROWS: tl.constexpr, BD: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    tile = r[:, None] * D + d[None, :]
    inside = (r < M)[:, None] & (d < D)[None, :]
    state = tl.zeros([ROWS, BD], dtype=tl.float32)
    for t in range(0, T):
        if t % STEPS == 0:
            tl.store(kept_ptr + (head * N + t // STEPS) * M * D + tile, state, mask=inside)
        at = (head * T + t) * D
        slot = (head * T + t) * M + r
        q = tl.load(q_ptr + at + d, mask=d < D, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at + d, mask=d < D, other=0.0).to(tl.float32)
        c = _drop(tl.load(g_ptr + slot, mask=r < M, other=0.0).to(tl.float32))
        state = state + c[:, None] * (k[None, :] - state)
        tl.store(scores_ptr + slot, tl.sum(state * q[None, :], 1), mask=r < M)


@triton.jit
def _softmax(scores_ptr, weight_ptr, R, M, LINES: tl.constexpr, BM: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    m = tl.arange(0, BM)
    inside = (line < R)[:, None] & (m < M)[None, :]
    at = line[:, None] * M + m[None, :]
    scores = tl.load(scores_ptr + at, mask=inside, other=0.0)
    scores = tl.where((m < M)[None, :], scores, float("-inf"))
    e = tl.exp(scores - tl.max(scores, 1)[:, None])
    tl.store(weight_ptr + at, e / tl.sum(e, 1)[:, None], mask=inside)


@triton.jit
def _values(
    v_ptr, g_ptr, weight_ptr, o_ptr, kept_ptr, T, D, M, N, STEPS, COLS: tl.constexpr, BM: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    m = tl.arange(0, BM)
    tile = m[:, None] * D + d[None, :]
    inside = (m < M)[:, None] & (d < D)[None, :]
    state = tl.zeros([BM, COLS], dtype=tl.float32)
    for t in range(0, T):
        if t % STEPS == 0:
            tl.store(kept_ptr + (head * N + t // STEPS) * M * D + tile, state, mask=inside)
        at = (head * T + t) * D + d
        slot = (head * T + t) * M + m
        v = tl.load(v_ptr + at, mask=d < D, other=0.0).to(tl.float32)
        c = _drop(tl.load(g_ptr + slot, mask=m < M, other=0.0).to(tl.float32))
        w = tl.load(weight_ptr + slot, mask=m < M, other=0.0)
        state = state + c[:, None] * (v[None, :] - state)
        o = tl.sum(w[:, None] * state, 0)
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _backward_values(
    v_ptr, g_ptr, weight_ptr, do_ptr, kept_ptr, scratch_ptr, dv_ptr, dw_ptr, dg_ptr, T, D, M, N, STEPS, HEADS,
    COLS: tl.constexpr, BM: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = block * COLS + tl.arange(0, COLS)
    m = tl.arange(0, BM)
    tile = m[:, None] * D + d[None, :]
    inside = (m < M)[:, None] & (d < D)[None, :]
    part = (block * HEADS + head) * T  # of the partial sums
    grad = tl.zeros([BM, COLS], dtype=tl.float32)
    for back in range(0, N):
        stretch = N - 1 - back
        first = stretch * STEPS
        last = tl.minimum(T, first + STEPS)
        state = tl.load(kept_ptr + (head * N + stretch) * M * D + tile, mask=inside, other=0.0)
        for t in range(first, last):
            tl.store(scratch_ptr + (head * STEPS + t - first) * M * D + tile, state, mask=inside)
            v = tl.load(v_ptr + (head * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
            c = _drop(tl.load(g_ptr + (head * T + t) * M + m, mask=m < M, other=0.0).to(tl.float32))
            state = state + c[:, None] * (v[None, :] - state)
        tl.debug_barrier()  # other threads of this program wrote what is read now
        for step in range(0, last - first):
            t = last - 1 - step
            at = (head * T + t) * D + d
            slot = (head * T + t) * M + m
            v = tl.load(v_ptr + at, mask=d < D, other=0.0).to(tl.float32)
            do = tl.load(do_ptr + at, mask=d < D, other=0.0).to(tl.float32)
            g = tl.load(g_ptr + slot, mask=m < M, other=0.0).to(tl.float32)
            w = tl.load(weight_ptr + slot, mask=m < M, other=0.0)
            before = tl.load(scratch_ptr + (head * STEPS + t - first) * M * D + tile, mask=inside, other=0.0)
            c = _drop(g)
            grad += w[:, None] * do[None, :]
            tl.store(dw_ptr + (part + t) * M + m, tl.sum(state * do[None, :], 1), mask=m < M)
            tl.store(dv_ptr + at, tl.sum(c[:, None] * grad, 0).to(dv_ptr.dtype.element_ty), mask=d < D)
            da = tl.sum(grad * (before - v[None, :]), 1)
            tl.store(dg_ptr + (part + t) * M + m, tl.exp(g) * da, mask=m < M)
            grad = grad - c[:, None] * grad
            state = before
        tl.debug_barrier()  # the scratch memory is written again


@triton.jit
def _backward_softmax(weight_ptr, dw_ptr, dl_ptr, R, M, BLOCKS, LINES: tl.constexpr, BM: tl.constexpr):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    m = tl.arange(0, BM)
    inside = (line < R)[:, None] & (m < M)[None, :]
    at = line[:, None] * M + m[None, :]
    w = tl.load(weight_ptr + at, mask=inside, other=0.0)
    dw = tl.zeros([LINES, BM], dtype=tl.float32)
    for block in range(0, BLOCKS):
        dw += tl.load(dw_ptr + (line + block * R)[:, None] * M + m[None, :], mask=inside, other=0.0)
    dl = w * (dw - tl.sum(w * dw, 1)[:, None])
    tl.store(dl_ptr + at, dl, mask=inside)


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, g_ptr, dl_ptr, kept_ptr, scratch_ptr, dq_ptr, dk_ptr, dg_ptr, T, D, M, N, STEPS, HEADS, PLACE,
    ROWS: tl.constexpr, BD: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    r = block * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    tile = r[:, None] * D + d[None, :]
    inside = (r < M)[:, None] & (d < D)[None, :]
    part = (block * HEADS + head) * T
    own = (PLACE * HEADS + head) * T  # the keys' share of dg stands behind the shares of the values' blocks
    grad = tl.zeros([ROWS, BD], dtype=tl.float32)
    for back in range(0, N):
        stretch = N - 1 - back
        first = stretch * STEPS
        last = tl.minimum(T, first + STEPS)
        state = tl.load(kept_ptr + (head * N + stretch) * M * D + tile, mask=inside, other=0.0)
        for t in range(first, last):
            tl.store(scratch_ptr + (head * STEPS + t - first) * M * D + tile, state, mask=inside)
            k = tl.load(k_ptr + (head * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
            c = _drop(tl.load(g_ptr + (head * T + t) * M + r, mask=r < M, other=0.0).to(tl.float32))
            state = state + c[:, None] * (k[None, :] - state)
        tl.debug_barrier()
        for step in range(0, last - first):
            t = last - 1 - step
            at = (head * T + t) * D + d
            slot = (head * T + t) * M + r
            q = tl.load(q_ptr + at, mask=d < D, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + at, mask=d < D, other=0.0).to(tl.float32)
            g = tl.load(g_ptr + slot, mask=r < M, other=0.0).to(tl.float32)
            dl = tl.load(dl_ptr + slot, mask=r < M, other=0.0)
            before = tl.load(scratch_ptr + (head * STEPS + t - first) * M * D + tile, mask=inside, other=0.0)
            c = _drop(g)
            grad += dl[:, None] * q[None, :]
            tl.store(dq_ptr + (part + t) * D + d, tl.sum(dl[:, None] * state, 0), mask=d < D)
            tl.store(dk_ptr + (part + t) * D + d, tl.sum(c[:, None] * grad, 0), mask=d < D)
            da = tl.sum(grad * (before - k[None, :]), 1)
            tl.store(dg_ptr + (own + t) * M + r, tl.exp(g) * da, mask=r < M)
            grad = grad - c[:, None] * grad
            state = before
        tl.debug_barrier()


def outputs_like(tensors, config):
    q, g = tensors["q"], tensors["g"]
    B, H, T, D = q.shape
    M = g.shape[3]
    N = triton.cdiv(T, config["STEPS"])
    saved = {
        "weight": torch.empty(g.shape, dtype=torch.float32, device=q.device),
        "kept_keys": torch.empty((B, H, N, M, D), dtype=torch.float32, device=q.device),
        "kept_values": torch.empty((B, H, N, M, D), dtype=torch.float32, device=q.device),
    }
    return {"o": torch.empty_like(q)}, saved


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    q, g = tensors["q"], tensors["g"]
    B, H, T, D = q.shape
    M, heads = g.shape[3], B * H
    if q.numel() > 0 and g.numel() > 0:
        N, warps = triton.cdiv(T, config["STEPS"]), config["num_warps"]
        BD, BM = triton.next_power_of_2(D), triton.next_power_of_2(M)
        scores = torch.empty_like(saved["weight"])
        _keys[(heads, triton.cdiv(M, config["ROWS"]))](
            q, tensors["k"], g, scores, saved["kept_keys"], T, D, M, N, config["STEPS"],
            ROWS=config["ROWS"], BD=BD, num_warps=warps,
        )
        _softmax[(triton.cdiv(heads * T, config["LINES"]),)](
            scores, saved["weight"], heads * T, M, LINES=config["LINES"], BM=BM, num_warps=warps
        )
        _values[(heads, triton.cdiv(D, config["COLS"]))](
            tensors["v"], g, saved["weight"], outputs["o"], saved["kept_values"], T, D, M, N, config["STEPS"],
            COLS=config["COLS"], BM=BM, num_warps=warps,
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    q, k, v, g = tensors["q"], tensors["k"], tensors["v"], tensors["g"]
    B, H, T, D = q.shape
    M, heads = g.shape[3], B * H
    found = {
        "q": torch.zeros_like(q),
        "k": torch.zeros_like(k),
        "v": torch.zeros_like(v),
        "g": torch.zeros_like(g),
    }
    do = grads["o"]
    if q.numel() > 0 and g.numel() > 0 and do is not None:
        N, warps = triton.cdiv(T, config["STEPS"]), config["num_warps"]
        BD, BM = triton.next_power_of_2(D), triton.next_power_of_2(M)
        rows, cols = triton.cdiv(M, config["ROWS"]), triton.cdiv(D, config["COLS"])
        wide = {"dtype": torch.float32, "device": q.device}
        scratch = torch.empty((heads, config["STEPS"], M, D), **wide)
        dw = torch.empty((cols, B, H, T, M), **wide)
        dg = torch.empty((cols + 1, B, H, T, M), **wide)
        dl = torch.empty((B, H, T, M), **wide)
        dq = torch.empty((rows, B, H, T, D), **wide)
        dk = torch.empty((rows, B, H, T, D), **wide)
        _backward_values[(heads, cols)](
            v, g, saved["weight"], do, saved["kept_values"], scratch, found["v"], dw, dg,
            T, D, M, N, config["STEPS"], heads, COLS=config["COLS"], BM=BM, num_warps=warps,
        )
        _backward_softmax[(triton.cdiv(heads * T, config["LINES"]),)](
            saved["weight"], dw, dl, heads * T, M, cols, LINES=config["LINES"], BM=BM, num_warps=warps
        )
        _backward_keys[(heads, rows)](
            q, k, g, dl, saved["kept_keys"], scratch, dq, dk, dg,
            T, D, M, N, config["STEPS"], heads, cols, ROWS=config["ROWS"], BD=BD, num_warps=warps,
        )
        found["q"] = dq.sum(0).to(q.dtype)
        found["k"] = dk.sum(0).to(k.dtype)
        found["g"] = dg.sum(0).to(g.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'q': 'differentiable', 'k': 'differentiable', 'v': 'differentiable', 'g': 'differentiable'}
OUTPUTS = {'o': 'differentiable'}
SPEC_DIGEST = '7b7c2b7a2815a16d'


def bucket(tensors):
    return {}
