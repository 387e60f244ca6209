"""Routed experts: h = x up[e], r = relu(h), a = r^2, v = a / rms(a), u = v * gain[e], y = sum over slots of score * u down[e].

A small kernel lists each expert's entries (entry f = 2 n + slot). Then a program owns some entries of one expert with all
W hidden units; what an entry adds to y and dx is written by slot and added up by the host. The weights' gradients are
made by programs that own a tile of up[e]' and down[e]' and walk the expert's entries, from dh and score * u in scratch.

g = dy down[e]^T; dscore = <g, u>; du = score g; dgain = sum du v; dv = du gain; da = (dv - v mean(dv v)) / rms;
dh = 2 r da; dx = dh up[e]^T; dup[e] = x^T dh; ddown[e] = (score u)^T dy. The float32 operands of products are multiplied
as a high and a low part of the narrow dtype, so that they are not rounded.
"""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BM": 32, "BC": 32, "BT": 64, "num_warps": 8},
    {"BM": 16, "BC": 64, "BT": 64, "num_warps": 4},
    {"BM": 64, "BC": 32, "BT": 64, "num_warps": 8},
]
INTERPRETER = {"BM": 128, "BC": 64, "BT": 256, "num_warps": 1}


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
def _route(index_ptr, list_ptr, count_ptr, F, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    found = tl.sum(tl.zeros([BLOCK], dtype=tl.int32), 0)
    for start in range(0, F, BLOCK):
        f = start + tl.arange(0, BLOCK)
        chosen = (tl.load(index_ptr + f, mask=f < F, other=-1) == e) & (f < F)
        one = chosen.to(tl.int32)
        place = found + tl.cumsum(one, 0) - 1
        tl.store(list_ptr + e * F + place, f, mask=chosen)
        found += tl.sum(one, 0)
    tl.store(count_ptr + e, found)


@triton.jit
def _forward(
    x_ptr, scores_ptr, up_ptr, down_ptr, gain_ptr, list_ptr, count_ptr, part_ptr, N, C, W, F,
    BM: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BM
    count = tl.load(count_ptr + e)
    place = first + tl.arange(0, BM)
    valid = place < count
    f = tl.load(list_ptr + e * F + place, mask=valid, other=0)
    n = (f // 2).to(tl.int64)
    w = tl.arange(0, BW)
    end = tl.where(first < count, C, 0)  # nothing to do without entries
    h = tl.zeros([BM, BW], dtype=tl.float32)
    for start in range(0, end, BC):
        c = start + tl.arange(0, BC)
        x = tl.load(x_ptr + n[:, None] * C + c[None, :], mask=valid[:, None] & (c < C)[None, :], other=0.0)
        up = tl.load(
            up_ptr + (e * C + c)[:, None] * W + w[None, :], mask=(c < C)[:, None] & (w < W)[None, :], other=0.0
        )
        h = tl.dot(x, up, h, input_precision="ieee")
    gain = tl.load(gain_ptr + e * W + w, mask=w < W, other=0.0).to(tl.float32)
    score = tl.load(scores_ptr + f, mask=valid, other=0.0).to(tl.float32)
    r = tl.maximum(h, 0.0)
    a = r * r
    inverse = 1.0 / tl.sqrt(tl.sum(a * a, 1) / W + 1e-6)
    u = a * inverse[:, None] * gain[None, :]
    line = ((f % 2) * N + n) * C
    for start in range(0, end, BC):
        c = start + tl.arange(0, BC)
        down = tl.load(
            down_ptr + (e * W + w)[:, None] * C + c[None, :], mask=(w < W)[:, None] & (c < C)[None, :], other=0.0
        )
        each = _dot_wide(u, down, tl.zeros([BM, BC], dtype=tl.float32))
        tl.store(
            part_ptr + line[:, None] + c[None, :], each * score[:, None], mask=valid[:, None] & (c < C)[None, :]
        )


@triton.jit
def _backward_entries(
    x_ptr, scores_ptr, up_ptr, down_ptr, gain_ptr, dy_ptr, list_ptr, count_ptr,
    dx_ptr, dscores_ptr, dgain_ptr, dh_ptr, cu_ptr, N, C, W, F, E,
    BM: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = block * BM
    count = tl.load(count_ptr + e)
    place = first + tl.arange(0, BM)
    valid = place < count
    f = tl.load(list_ptr + e * F + place, mask=valid, other=0)
    n = (f // 2).to(tl.int64)
    w = tl.arange(0, BW)
    end = tl.where(first < count, C, 0)
    h = tl.zeros([BM, BW], dtype=tl.float32)
    g = tl.zeros([BM, BW], dtype=tl.float32)
    for start in range(0, end, BC):
        c = start + tl.arange(0, BC)
        at = n[:, None] * C + c[None, :]
        here = valid[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        dy = tl.load(dy_ptr + at, mask=here, other=0.0)
        up = tl.load(
            up_ptr + (e * C + c)[:, None] * W + w[None, :], mask=(c < C)[:, None] & (w < W)[None, :], other=0.0
        )
        down = tl.load(
            down_ptr + (e * W + w)[:, None] * C + c[None, :], mask=(w < W)[:, None] & (c < C)[None, :], other=0.0
        )
        h = tl.dot(x, up, h, input_precision="ieee")
        g = tl.dot(dy, tl.trans(down), g, input_precision="ieee")
    gain = tl.load(gain_ptr + e * W + w, mask=w < W, other=0.0).to(tl.float32)
    score = tl.load(scores_ptr + f, mask=valid, other=0.0).to(tl.float32)
    r = tl.maximum(h, 0.0)
    a = r * r
    inverse = 1.0 / tl.sqrt(tl.sum(a * a, 1) / W + 1e-6)
    v = a * inverse[:, None]
    u = v * gain[None, :]
    tl.store(dscores_ptr + f, tl.sum(g * u, 1).to(dscores_ptr.dtype.element_ty), mask=valid)
    du = score[:, None] * g
    tl.store(dgain_ptr + (block * E + e) * W + w, tl.sum(du * v, 0), mask=w < W)
    dv = du * gain[None, :]
    mean = tl.sum(dv * v, 1) / W
    dh = 2.0 * r * (inverse[:, None] * (dv - v * mean[:, None]))
    kept = f.to(tl.int64)[:, None] * W + w[None, :]
    tl.store(dh_ptr + kept, dh, mask=valid[:, None] & (w < W)[None, :])
    tl.store(cu_ptr + kept, score[:, None] * u, mask=valid[:, None] & (w < W)[None, :])
    line = ((f % 2) * N + n) * C
    for start in range(0, end, BC):
        c = start + tl.arange(0, BC)
        up = tl.load(
            up_ptr + (e * C + c)[:, None] * W + w[None, :], mask=(c < C)[:, None] & (w < W)[None, :], other=0.0
        )
        dx = _dot_wide(dh, tl.trans(up), tl.zeros([BM, BC], dtype=tl.float32))
        tl.store(dx_ptr + line[:, None] + c[None, :], dx, mask=valid[:, None] & (c < C)[None, :])


@triton.jit
def _backward_weights(
    x_ptr, dy_ptr, dh_ptr, cu_ptr, list_ptr, count_ptr, dup_ptr, ddown_ptr, C, W, F,
    BM: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    w = tl.program_id(2) * BT + tl.arange(0, BT)
    count = tl.load(count_ptr + e)
    dup = tl.zeros([BT, BC], dtype=tl.float32)  # transposed
    ddown = tl.zeros([BT, BC], dtype=tl.float32)
    for start in range(0, count, BM):
        place = start + tl.arange(0, BM)
        valid = place < count
        f = tl.load(list_ptr + e * F + place, mask=valid, other=0).to(tl.int64)
        at = (f // 2)[:, None] * C + c[None, :]
        here = valid[:, None] & (c < C)[None, :]
        kept = f[:, None] * W + w[None, :]
        there = valid[:, None] & (w < W)[None, :]
        x = tl.load(x_ptr + at, mask=here, other=0.0)
        dy = tl.load(dy_ptr + at, mask=here, other=0.0)
        dh = tl.load(dh_ptr + kept, mask=there, other=0.0)
        cu = tl.load(cu_ptr + kept, mask=there, other=0.0)
        dup = _dot_wide(tl.trans(dh), x, dup)
        ddown = _dot_wide(tl.trans(cu), dy, ddown)
    tl.store(
        dup_ptr + (e * C + c)[:, None] * W + w[None, :],
        tl.trans(dup).to(dup_ptr.dtype.element_ty),
        mask=(c < C)[:, None] & (w < W)[None, :],
    )
    tl.store(
        ddown_ptr + (e * W + w)[:, None] * C + c[None, :],
        ddown.to(ddown_ptr.dtype.element_ty),
        mask=(w < W)[:, None] & (c < C)[None, :],
    )


def outputs_like(tensors, config):
    return {"y": torch.empty_like(tensors["x"])}, {}


def route(index, experts):
    entries = index.shape[0] * 2
    order = torch.empty((experts, entries), dtype=torch.int32, device=index.device)
    count = torch.empty((experts,), dtype=torch.int32, device=index.device)
    _route[(experts,)](index, order, count, entries, BLOCK=1024, num_warps=4)
    return order, count


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    x, index, up, down = tensors["x"], tensors["index"], tensors["up"], tensors["down"]
    N, C = x.shape
    E, W = up.shape[0], up.shape[2]
    if x.numel() > 0:
        order, count = route(index, E)
        part = torch.empty((2, N, C), dtype=torch.float32, device=x.device)
        _forward[(E, triton.cdiv(2 * N, config["BM"]))](
            x, tensors["scores"], up, down, tensors["gain"], order, count, part, N, C, W, 2 * N,
            BM=config["BM"], BC=config["BC"], BW=max(16, triton.next_power_of_2(W)),
            num_warps=config["num_warps"], num_stages=2,
        )
        outputs["y"] = part.sum(0).to(x.dtype)
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    x, index, scores = tensors["x"], tensors["index"], tensors["scores"]
    up, down, gain = tensors["up"], tensors["down"], tensors["gain"]
    N, C = x.shape
    E, W = up.shape[0], up.shape[2]
    found = {
        "x": torch.zeros_like(x),
        "scores": torch.zeros_like(scores),
        "up": torch.zeros_like(up),
        "down": torch.zeros_like(down),
        "gain": torch.zeros_like(gain),
    }
    dy = grads["y"]
    if x.numel() > 0 and dy is not None:
        order, count = route(index, E)
        wide = {"dtype": torch.float32, "device": x.device}
        blocks = triton.cdiv(2 * N, config["BM"])
        BW = max(16, triton.next_power_of_2(W))
        BT = min(config["BT"], BW)
        dx = torch.empty((2, N, C), **wide)
        dgain = torch.empty((blocks, E, W), **wide)
        dh, cu = torch.empty((2 * N, W), **wide), torch.empty((2 * N, W), **wide)
        _backward_entries[(E, blocks)](
            x, scores, up, down, gain, dy, order, count, dx, found["scores"], dgain, dh, cu, N, C, W, 2 * N, E,
            BM=config["BM"], BC=config["BC"], BW=BW, num_warps=config["num_warps"], num_stages=2,
        )
        _backward_weights[(E, triton.cdiv(C, config["BC"]), triton.cdiv(W, BT))](
            x, dy, dh, cu, order, count, found["up"], found["down"], C, W, 2 * N,
            BM=config["BM"], BC=config["BC"], BT=BT, num_warps=4, num_stages=2,
        )
        found["x"] = dx.sum(0).to(x.dtype)
        found["gain"] = dgain.sum(0).to(gain.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'x': 'differentiable', 'index': '', 'scores': 'differentiable', 'up': 'differentiable', 'down': 'differentiable', 'gain': 'differentiable'}
OUTPUTS = {'y': 'differentiable'}
SPEC_DIGEST = 'decd2127f34f6f0e'


def bucket(tensors):
    return {}
