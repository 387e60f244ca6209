"""y = silu(causal_conv4(gate) + bias) * up + gate. Backward in two launches: the first writes dup, the gradient dm of the
convolution's result (float32 scratch) and partial sums for taps and bias; the second convolves dm back to dgate."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"ROWS": 16, "SPAN": 64, "BLOCK": 64, "num_warps": 4},
    {"ROWS": 16, "SPAN": 128, "BLOCK": 128, "num_warps": 4},
    {"ROWS": 8, "SPAN": 64, "BLOCK": 128, "num_warps": 4},
]
INTERPRETER = {"ROWS": 256, "SPAN": 256, "BLOCK": 256, "num_warps": 1}


@triton.jit
def _forward(
    gate_ptr, up_ptr, taps_ptr, bias_ptr, y_ptr, R, T, C, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = row % T
    wanted = (col < C)[None, :]
    inside = (row < R)[:, None] & wanted
    at = row[:, None] * C + col[None, :]
    w0 = tl.load(taps_ptr + col * 4, mask=col < C, other=0.0).to(tl.float32)
    w1 = tl.load(taps_ptr + col * 4 + 1, mask=col < C, other=0.0).to(tl.float32)
    w2 = tl.load(taps_ptr + col * 4 + 2, mask=col < C, other=0.0).to(tl.float32)
    w3 = tl.load(taps_ptr + col * 4 + 3, mask=col < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + col, mask=col < C, other=0.0).to(tl.float32)
    g0 = tl.load(gate_ptr + at - 3 * C, mask=inside & (t >= 3)[:, None], other=0.0).to(tl.float32)
    g1 = tl.load(gate_ptr + at - 2 * C, mask=inside & (t >= 2)[:, None], other=0.0).to(tl.float32)
    g2 = tl.load(gate_ptr + at - C, mask=inside & (t >= 1)[:, None], other=0.0).to(tl.float32)
    g3 = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = g0 * w0[None, :] + g1 * w1[None, :] + g2 * w2[None, :] + g3 * w3[None, :] + bias[None, :]
    y = m * tl.sigmoid(m) * up + g3
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_inner(
    dy_ptr, gate_ptr, up_ptr, taps_ptr, bias_ptr, dup_ptr, dm_ptr, dtaps_ptr, dbias_ptr, R, T, C,
    ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0 = tl.load(taps_ptr + col * 4, mask=col < C, other=0.0).to(tl.float32)
    w1 = tl.load(taps_ptr + col * 4 + 1, mask=col < C, other=0.0).to(tl.float32)
    w2 = tl.load(taps_ptr + col * 4 + 2, mask=col < C, other=0.0).to(tl.float32)
    w3 = tl.load(taps_ptr + col * 4 + 3, mask=col < C, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + col, mask=col < C, other=0.0).to(tl.float32)
    s0 = tl.zeros([BLOCK], dtype=tl.float32)
    s1 = tl.zeros([BLOCK], dtype=tl.float32)
    s2 = tl.zeros([BLOCK], dtype=tl.float32)
    s3 = tl.zeros([BLOCK], dtype=tl.float32)
    sb = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, SPAN, ROWS):
        row = part * SPAN + start + tl.arange(0, ROWS)
        t = row % T
        inside = (row < R)[:, None] & (col < C)[None, :]
        at = row[:, None] * C + col[None, :]
        g0 = tl.load(gate_ptr + at - 3 * C, mask=inside & (t >= 3)[:, None], other=0.0).to(tl.float32)
        g1 = tl.load(gate_ptr + at - 2 * C, mask=inside & (t >= 2)[:, None], other=0.0).to(tl.float32)
        g2 = tl.load(gate_ptr + at - C, mask=inside & (t >= 1)[:, None], other=0.0).to(tl.float32)
        g3 = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        m = g0 * w0[None, :] + g1 * w1[None, :] + g2 * w2[None, :] + g3 * w3[None, :] + bias[None, :]
        s = tl.sigmoid(m)
        tl.store(dup_ptr + at, (dy * m * s).to(dup_ptr.dtype.element_ty), mask=inside)
        dm = dy * up * (s + s * m * (1.0 - s))
        tl.store(dm_ptr + at, dm, mask=inside)
        s0 += tl.sum(dm * g0, axis=0)
        s1 += tl.sum(dm * g1, axis=0)
        s2 += tl.sum(dm * g2, axis=0)
        s3 += tl.sum(dm * g3, axis=0)
        sb += tl.sum(dm, axis=0)
    own = part * C + col
    tl.store(dtaps_ptr + own * 4, s0, mask=col < C)
    tl.store(dtaps_ptr + own * 4 + 1, s1, mask=col < C)
    tl.store(dtaps_ptr + own * 4 + 2, s2, mask=col < C)
    tl.store(dtaps_ptr + own * 4 + 3, s3, mask=col < C)
    tl.store(dbias_ptr + own, sb, mask=col < C)


@triton.jit
def _backward_gate(dy_ptr, dm_ptr, taps_ptr, dgate_ptr, R, T, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = row % T
    inside = (row < R)[:, None] & (col < C)[None, :]
    at = row[:, None] * C + col[None, :]
    w0 = tl.load(taps_ptr + col * 4, mask=col < C, other=0.0).to(tl.float32)
    w1 = tl.load(taps_ptr + col * 4 + 1, mask=col < C, other=0.0).to(tl.float32)
    w2 = tl.load(taps_ptr + col * 4 + 2, mask=col < C, other=0.0).to(tl.float32)
    w3 = tl.load(taps_ptr + col * 4 + 3, mask=col < C, other=0.0).to(tl.float32)
    d0 = tl.load(dm_ptr + at + 3 * C, mask=inside & (t + 3 < T)[:, None], other=0.0)
    d1 = tl.load(dm_ptr + at + 2 * C, mask=inside & (t + 2 < T)[:, None], other=0.0)
    d2 = tl.load(dm_ptr + at + C, mask=inside & (t + 1 < T)[:, None], other=0.0)
    d3 = tl.load(dm_ptr + at, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dgate = d0 * w0[None, :] + d1 * w1[None, :] + d2 * w2[None, :] + d3 * w3[None, :] + dy
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)


def outputs_like(tensors, config):
    return {"y": torch.empty_like(tensors["gate"])}, {}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    gate = tensors["gate"]
    B, T, C = gate.shape
    if gate.numel() > 0:
        grid = (triton.cdiv(B * T, config["ROWS"]), triton.cdiv(C, config["BLOCK"]))
        _forward[grid](
            gate, tensors["up"], tensors["taps"], tensors["bias"], outputs["y"], B * T, T, C,
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    gate, up, taps, bias = tensors["gate"], tensors["up"], tensors["taps"], tensors["bias"]
    B, T, C = gate.shape
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    dtaps, dbias = torch.zeros_like(taps), torch.zeros_like(bias)
    if gate.numel() > 0:
        dy = grads["y"]
        if dy is None:
            dy = torch.zeros_like(gate)
        parts = triton.cdiv(B * T, config["SPAN"])
        columns = triton.cdiv(C, config["BLOCK"])
        dm = torch.empty((B, T, C), dtype=torch.float32, device=gate.device)
        taps_parts = torch.empty((parts, C, 4), dtype=torch.float32, device=gate.device)
        bias_parts = torch.empty((parts, C), dtype=torch.float32, device=gate.device)
        _backward_inner[(parts, columns)](
            dy, gate, up, taps, bias, dup, dm, taps_parts, bias_parts, B * T, T, C,
            ROWS=config["ROWS"], SPAN=config["SPAN"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
        _backward_gate[(triton.cdiv(B * T, config["ROWS"]), columns)](
            dy, dm, taps, dgate, B * T, T, C,
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
        dtaps = taps_parts.sum(0).to(taps.dtype)
        dbias = bias_parts.sum(0).to(bias.dtype)
    found = {"gate": dgate, "up": dup, "taps": dtaps, "bias": dbias}
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'gate': 'differentiable', 'up': 'differentiable', 'taps': 'differentiable', 'bias': 'differentiable'}
OUTPUTS = {'y': 'differentiable'}
SPEC_DIGEST = '844c6ff8c230f488'


def bucket(tensors):
    return {}
