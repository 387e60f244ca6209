"""The damped moving average of Mega. keep = 1 - p with p = rise * damp is constant in time, so the state is
rise * beta * H with H_t = (1 - p) H_{t-1} + x_t, and y_t = sum_n w H_t with w = rise * beta * eta.

A program owns some (batch, channel) pairs with all their N states and walks time. Backward keeps no states: the
parameters of one state are scalars, so their derivatives are carried forward in time, while dx is carried backward:
  G_t = dH_t/dkeep = (1 - p) G_{t-1} + H_{t-1},   P = sum_t dy_t H_t,   Q = sum_t dy_t G_t,
  E_t = dy_t + (1 - p) E_{t+1},   dx_t = sum_n w E_t.
"""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"BLOCK": 4, "num_warps": 1},
    {"BLOCK": 8, "num_warps": 1},
    {"BLOCK": 16, "num_warps": 2},
    {"BLOCK": 32, "num_warps": 4},
]
INTERPRETER = {"BLOCK": 256, "num_warps": 1}


@triton.jit
def _forward(
    x_ptr, alpha_ptr, delta_ptr, beta_ptr, eta_ptr, y_ptr, R, T, C, N, BLOCK: tl.constexpr, BN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BN)
    inside = (row < R)[:, None] & (n < N)[None, :]
    batch = row // C
    channel = row % C
    place = channel[:, None] * N + n[None, :]
    alpha = tl.load(alpha_ptr + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    eta = tl.load(eta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    ea = tl.exp(-tl.abs(alpha))
    ed = tl.exp(-tl.abs(delta))
    rise = tl.where(alpha >= 0.0, 1.0, ea) / (1.0 + ea)
    damp = tl.where(delta >= 0.0, 1.0, ed) / (1.0 + ed)
    p = rise * damp
    w = rise * beta * eta
    at = batch * T * C + channel
    h = tl.zeros([BLOCK, BN], dtype=tl.float32)
    for step in range(0, T):
        x = tl.load(x_ptr + at, mask=row < R, other=0.0).to(tl.float32)
        h = h + (x[:, None] - p * h)
        y = tl.sum(w * h, axis=1)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=row < R)
        at = at + C


@triton.jit
def _backward(
    dy_ptr, x_ptr, alpha_ptr, delta_ptr, beta_ptr, eta_ptr, dx_ptr, dalpha_ptr, ddelta_ptr, dbeta_ptr, deta_ptr,
    R, T, C, N, BLOCK: tl.constexpr, BN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BN)
    inside = (row < R)[:, None] & (n < N)[None, :]
    batch = row // C
    channel = row % C
    place = channel[:, None] * N + n[None, :]
    alpha = tl.load(alpha_ptr + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    eta = tl.load(eta_ptr + place, mask=inside, other=0.0).to(tl.float32)
    ea = tl.exp(-tl.abs(alpha))
    ed = tl.exp(-tl.abs(delta))
    rise = tl.where(alpha >= 0.0, 1.0, ea) / (1.0 + ea)
    damp = tl.where(delta >= 0.0, 1.0, ed) / (1.0 + ed)
    # 1 - sigmoid without cancellation; it is 0 where 1 - sigmoid is 0 in float64 too
    fall_a = tl.where(alpha >= 0.0, ea, 1.0) / (1.0 + ea)
    fall_d = tl.where(delta >= 0.0, ed, 1.0) / (1.0 + ed)
    fall_a = tl.where(fall_a > 1.12e-16, fall_a, 0.0)
    fall_d = tl.where(fall_d > 1.12e-16, fall_d, 0.0)
    p = rise * damp
    w = rise * beta * eta
    at = batch * T * C + channel
    back = (batch * T + (T - 1)) * C + channel
    h = tl.zeros([BLOCK, BN], dtype=tl.float32)
    g = tl.zeros([BLOCK, BN], dtype=tl.float32)
    e = tl.zeros([BLOCK, BN], dtype=tl.float32)
    sum_h = tl.zeros([BLOCK, BN], dtype=tl.float32)
    sum_g = tl.zeros([BLOCK, BN], dtype=tl.float32)
    for step in range(0, T):
        x = tl.load(x_ptr + at, mask=row < R, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=row < R, other=0.0).to(tl.float32)
        late = tl.load(dy_ptr + back, mask=row < R, other=0.0).to(tl.float32)
        g = g + (h - p * g)
        h = h + (x[:, None] - p * h)
        sum_h += dy[:, None] * h
        sum_g += dy[:, None] * g
        e = e + (late[:, None] - p * e)
        dx = tl.sum(w * e, axis=1)
        tl.store(dx_ptr + back, dx.to(dx_ptr.dtype.element_ty), mask=row < R)
        at = at + C
        back = back - C
    part = row[:, None] * N + n[None, :]
    direct = beta * eta * sum_h
    through = w * sum_g  # the gradient of keep
    tl.store(dalpha_ptr + part, (direct - damp * through) * rise * fall_a, mask=inside)
    tl.store(ddelta_ptr + part, -(rise * through) * damp * fall_d, mask=inside)
    tl.store(dbeta_ptr + part, rise * eta * sum_h, mask=inside)
    tl.store(deta_ptr + part, rise * beta * sum_h, mask=inside)


def outputs_like(tensors, config):
    return {"y": torch.empty_like(tensors["x"])}, {}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    x, alpha = tensors["x"], tensors["alpha"]
    B, T, C = x.shape
    N = alpha.shape[1]
    if x.numel() > 0:
        _forward[(triton.cdiv(B * C, config["BLOCK"]),)](
            x, alpha, tensors["delta"], tensors["beta"], tensors["eta"], outputs["y"], B * C, T, C, N,
            BLOCK=config["BLOCK"], BN=triton.next_power_of_2(N), num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    x, alpha, delta = tensors["x"], tensors["alpha"], tensors["delta"]
    beta, eta = tensors["beta"], tensors["eta"]
    B, T, C = x.shape
    N = alpha.shape[1]
    found = {
        "x": torch.empty_like(x),
        "alpha": torch.zeros_like(alpha),
        "delta": torch.zeros_like(delta),
        "beta": torch.zeros_like(beta),
        "eta": torch.zeros_like(eta),
    }
    if x.numel() > 0:
        dy = grads["y"]
        if dy is None:
            dy = torch.zeros_like(x)
        dalpha = torch.empty((B, C, N), dtype=torch.float32, device=x.device)
        ddelta = torch.empty((B, C, N), dtype=torch.float32, device=x.device)
        dbeta = torch.empty((B, C, N), dtype=torch.float32, device=x.device)
        deta = torch.empty((B, C, N), dtype=torch.float32, device=x.device)
        _backward[(triton.cdiv(B * C, config["BLOCK"]),)](
            dy, x, alpha, delta, beta, eta, found["x"], dalpha, ddelta, dbeta, deta, B * C, T, C, N,
            BLOCK=config["BLOCK"], BN=triton.next_power_of_2(N), num_warps=config["num_warps"],
        )
        found["alpha"] = dalpha.sum(0).to(alpha.dtype)
        found["delta"] = ddelta.sum(0).to(delta.dtype)
        found["beta"] = dbeta.sum(0).to(beta.dtype)
        found["eta"] = deta.sum(0).to(eta.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'x': 'differentiable', 'alpha': 'differentiable', 'delta': 'differentiable', 'beta': 'differentiable', 'eta': 'differentiable'}
OUTPUTS = {'y': 'differentiable'}
SPEC_DIGEST = '24b72efff494e88a'


def bucket(tensors):
    return {}
