"""y = after * conv(x * before, taps), causal, one filter per channel. A program owns a tile of rows (batch, time) and
channels and walks the K taps. Backward walks them once for everything: the convolution again (for dafter), its adjoint
(for dx and dbefore), and for each tap the tile's share of dtaps, written apart and added up by the host."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"ROWS": 32, "BLOCK": 64, "num_warps": 4},
    {"ROWS": 64, "BLOCK": 32, "num_warps": 4},
    {"ROWS": 64, "BLOCK": 64, "num_warps": 8},
]
INTERPRETER = {"ROWS": 256, "BLOCK": 64, "num_warps": 1}


@triton.jit
def _forward(
    x_ptr, before_ptr, after_ptr, taps_ptr, y_ptr, R, T, C, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = row % T
    inside = (row < R)[:, None] & (col < C)[None, :]
    at = row[:, None] * C + col[None, :]
    mixed = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for k in range(0, K):
        tap = tl.load(taps_ptr + col * K + k, mask=col < C, other=0.0).to(tl.float32)
        past = inside & (t >= k)[:, None]
        x = tl.load(x_ptr + (at - k * C), mask=past, other=0.0).to(tl.float32)
        before = tl.load(before_ptr + (at - k * C), mask=past, other=0.0).to(tl.float32)
        mixed += x * before * tap[None, :]
    after = tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (after * mixed).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, before_ptr, after_ptr, taps_ptr, dx_ptr, dbefore_ptr, dafter_ptr, dtaps_ptr, R, T, C, K,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = row % T
    inside = (row < R)[:, None] & (col < C)[None, :]
    at = row[:, None] * C + col[None, :]
    own = (part * C + col) * K
    own_dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    own_dm = own_dy * tl.load(after_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    du = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for k in range(0, K):
        tap = tl.load(taps_ptr + col * K + k, mask=col < C, other=0.0).to(tl.float32)
        past = inside & (t >= k)[:, None]
        x = tl.load(x_ptr + (at - k * C), mask=past, other=0.0).to(tl.float32)
        before = tl.load(before_ptr + (at - k * C), mask=past, other=0.0).to(tl.float32)
        u = x * before
        mixed += u * tap[None, :]
        tl.store(dtaps_ptr + own + k, tl.sum(own_dm * u, axis=0), mask=col < C)
        future = inside & (t + k < T)[:, None]
        dy = tl.load(dy_ptr + (at + k * C), mask=future, other=0.0).to(tl.float32)
        after = tl.load(after_ptr + (at + k * C), mask=future, other=0.0).to(tl.float32)
        du += dy * after * tap[None, :]
    own_x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    own_before = tl.load(before_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, (du * own_before).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dbefore_ptr + at, (du * own_x).to(dbefore_ptr.dtype.element_ty), mask=inside)
    tl.store(dafter_ptr + at, (own_dy * mixed).to(dafter_ptr.dtype.element_ty), mask=inside)


def outputs_like(tensors, config):
    return {"y": torch.empty_like(tensors["x"])}, {}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    x, taps = tensors["x"], tensors["taps"]
    B, T, C = x.shape
    if x.numel() > 0:
        grid = (triton.cdiv(B * T, config["ROWS"]), triton.cdiv(C, config["BLOCK"]))
        _forward[grid](
            x, tensors["before"], tensors["after"], taps, outputs["y"], B * T, T, C, taps.shape[1],
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    x, before, after, taps = tensors["x"], tensors["before"], tensors["after"], tensors["taps"]
    B, T, C = x.shape
    K = taps.shape[1]
    found = {
        "x": torch.empty_like(x),
        "before": torch.empty_like(before),
        "after": torch.empty_like(after),
        "taps": torch.zeros_like(taps),
    }
    if x.numel() > 0:
        dy = grads["y"]
        if dy is None:
            dy = torch.zeros_like(x)
        parts = triton.cdiv(B * T, config["ROWS"])
        dtaps = torch.empty((parts, C, K), dtype=torch.float32, device=x.device)
        _backward[(parts, triton.cdiv(C, config["BLOCK"]))](
            dy, x, before, after, taps, found["x"], found["before"], found["after"], dtaps, B * T, T, C, K,
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
        found["taps"] = dtaps.sum(0).to(taps.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'x': 'differentiable', 'before': 'differentiable', 'after': 'differentiable', 'taps': 'differentiable'}
OUTPUTS = {'y': 'differentiable'}
SPEC_DIGEST = '9fed4fed660f287c'


def bucket(tensors):
    return {}
