"""A state-space scan with the trapezoidal rule. With s = softplus(dt), m = sigmoid(lam), A = exp(a_log), U_t = x_t b_t^T:
alpha = exp(-s A), beta = (1 - m) s alpha, gamma = m s, S_t = alpha S_{t-1} + beta U_{t-1} + gamma U_t, y_t = S_t c_t.

A program owns some rows (channels of x) of one head's state and walks time. Forward keeps the state before every STEPS
steps. Backward goes over these stretches from the last to the first: it computes a stretch's states again into scratch
memory of its own, then walks it back. With D_t the gradient of S_t:
  D_t = dy_t c_t^T + alpha_{t+1} D_{t+1},  dU_t = gamma_t D_t + beta_{t+1} D_{t+1},
  dx_t = dU_t b_t, db_t = dU_t^T x_t, dc_t = S_t^T dy_t,
  dalpha = <D_t, S_{t-1}>, dbeta = <D_t, U_{t-1}>, dgamma = <D_t, U_t>.
What sums over rows or heads is written once a block and added up by the host.
"""

import torch
import triton
import triton.language as tl

CONFIGS = [
    {"ROWS": 16, "STEPS": 64, "num_warps": 2},
    {"ROWS": 32, "STEPS": 64, "num_warps": 4},
    {"ROWS": 16, "STEPS": 32, "num_warps": 4},
]
INTERPRETER = {"ROWS": 64, "STEPS": 64, "num_warps": 1}


@triton.jit
def _soft(e):
    # log(1 + e) for 0 <= e <= 1 as 2 atanh(e / (2 + e))
    y = e / (2.0 + e)
    z = y * y
    tail = 1.0 / 9.0 + z * (1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0)))
    return 2.0 * y * (1.0 + z * (1.0 / 3.0 + z * (1.0 / 5.0 + z * (1.0 / 7.0 + z * tail))))


@triton.jit
def _gates(dt, lam, rate):
    # softplus(dt) and its slope, sigmoid(lam) and its complement (0 where it is 0 in float64 too), step * rate
    e = tl.exp(-tl.abs(dt))
    step = tl.maximum(dt, 0.0) + _soft(e)
    slope = tl.where(dt >= 0.0, 1.0, e) / (1.0 + e)
    f = tl.exp(-tl.abs(lam))
    mix = tl.where(lam >= 0.0, 1.0, f) / (1.0 + f)
    rest = tl.where(lam >= 0.0, f, 1.0) / (1.0 + f)
    rest = tl.where(rest > 1.12e-16, rest, 0.0)
    return step, slope, mix, rest, tl.minimum(step * rate, 1.0e30)


@triton.jit
def _forward(
    x_ptr, dt_ptr, lam_ptr, log_ptr, b_ptr, c_ptr, y_ptr, kept_ptr, T, H, P, N, S, STEPS,
    ROWS: tl.constexpr, BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    batch = head // H
    h = head % H
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    tile = r[:, None] * N + n[None, :]
    inside = (r < P)[:, None] & (n < N)[None, :]
    rate = tl.exp(tl.minimum(tl.load(log_ptr + h).to(tl.float32), 88.0))
    state = tl.zeros([ROWS, BN], dtype=tl.float32)
    last_x = tl.zeros([ROWS], dtype=tl.float32)
    last_b = tl.zeros([BN], dtype=tl.float32)
    for t in range(0, T):
        if t % STEPS == 0:
            tl.store(kept_ptr + (head * S + t // STEPS) * P * N + tile, state, mask=inside)
        line = batch * T + t
        dt = tl.load(dt_ptr + line * H + h).to(tl.float32)
        lam = tl.load(lam_ptr + line * H + h).to(tl.float32)
        at = (line * H + h) * P + r
        x = tl.load(x_ptr + at, mask=r < P, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + line * N + n, mask=n < N, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + line * N + n, mask=n < N, other=0.0).to(tl.float32)
        step, slope, mix, rest, decay = _gates(dt, lam, rate)
        alpha = tl.exp(-decay)
        state = alpha * state + (rest * step * alpha * last_x)[:, None] * last_b[None, :]
        state = state + (mix * step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=r < P)
        last_x = x
        last_b = b


@triton.jit
def _backward(
    x_ptr, dt_ptr, lam_ptr, log_ptr, b_ptr, c_ptr, dy_ptr, kept_ptr, scratch_ptr,
    dx_ptr, ddt_ptr, dlam_ptr, dlog_ptr, db_ptr, dc_ptr, B, T, H, P, N, S, STEPS,
    ROWS: tl.constexpr, BN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    batch = head // H
    h = head % H
    block = tl.program_id(1)
    r = block * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    tile = r[:, None] * N + n[None, :]
    inside = (r < P)[:, None] & (n < N)[None, :]
    rate = tl.exp(tl.minimum(tl.load(log_ptr + h).to(tl.float32), 88.0))
    narrow = (block * B + batch) * T  # of the shares of ddt and dlam, [blocks, B, T, H]
    wide = ((block * H + h) * B + batch) * T  # of the shares of db and dc, [blocks, H, B, T, N]
    grad = tl.zeros([ROWS, BN], dtype=tl.float32)  # alpha_{t+1} D_{t+1}
    late = tl.zeros([ROWS, BN], dtype=tl.float32)  # beta_{t+1} D_{t+1}
    total = tl.sum(tl.zeros([ROWS], dtype=tl.float32), 0)
    for back in range(0, S):
        stretch = S - 1 - back
        first = stretch * STEPS
        last = tl.minimum(T, first + STEPS)
        state = tl.load(kept_ptr + (head * S + stretch) * P * N + tile, mask=inside, other=0.0)
        for t in range(first, last):
            tl.store(scratch_ptr + (head * STEPS + t - first) * P * N + tile, state, mask=inside)  # S_{t-1}
            line = batch * T + t
            began_r = tl.zeros([ROWS], dtype=tl.int32) + t > 0
            began_n = tl.zeros([BN], dtype=tl.int32) + t > 0
            dt = tl.load(dt_ptr + line * H + h).to(tl.float32)
            lam = tl.load(lam_ptr + line * H + h).to(tl.float32)
            at = (line * H + h) * P + r
            x = tl.load(x_ptr + at, mask=r < P, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + line * N + n, mask=n < N, other=0.0).to(tl.float32)
            last_x = tl.load(x_ptr + at - H * P, mask=(r < P) & began_r, other=0.0).to(tl.float32)
            last_b = tl.load(b_ptr + (line - 1) * N + n, mask=(n < N) & began_n, other=0.0).to(tl.float32)
            step, slope, mix, rest, decay = _gates(dt, lam, rate)
            alpha = tl.exp(-decay)
            state = alpha * state + (rest * step * alpha * last_x)[:, None] * last_b[None, :]
            state = state + (mix * step * x)[:, None] * b[None, :]
        tl.debug_barrier()  # other threads of this program wrote what is read now
        for walked in range(0, last - first):
            t = last - 1 - walked
            line = batch * T + t
            began_r = tl.zeros([ROWS], dtype=tl.int32) + t > 0
            began_n = tl.zeros([BN], dtype=tl.int32) + t > 0
            dt = tl.load(dt_ptr + line * H + h).to(tl.float32)
            lam = tl.load(lam_ptr + line * H + h).to(tl.float32)
            at = (line * H + h) * P + r
            x = tl.load(x_ptr + at, mask=r < P, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + at, mask=r < P, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + line * N + n, mask=n < N, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + line * N + n, mask=n < N, other=0.0).to(tl.float32)
            last_x = tl.load(x_ptr + at - H * P, mask=(r < P) & began_r, other=0.0).to(tl.float32)
            last_b = tl.load(b_ptr + (line - 1) * N + n, mask=(n < N) & began_n, other=0.0).to(tl.float32)
            before = tl.load(scratch_ptr + (head * STEPS + t - first) * P * N + tile, mask=inside, other=0.0)
            step, slope, mix, rest, decay = _gates(dt, lam, rate)
            alpha = tl.exp(-decay)
            grad = grad + dy[:, None] * c[None, :]  # now D_t
            du = mix * step * grad + late
            tl.store(dx_ptr + at, tl.sum(du * b[None, :], 1).to(dx_ptr.dtype.element_ty), mask=r < P)
            tl.store(db_ptr + (wide + t) * N + n, tl.sum(du * x[:, None], 0), mask=n < N)
            tl.store(dc_ptr + (wide + t) * N + n, tl.sum(state * dy[:, None], 0), mask=n < N)
            dalpha = tl.sum(tl.sum(grad * before, 1), 0)
            dbeta = tl.sum(tl.sum(grad * last_b[None, :], 1) * last_x, 0)
            dgamma = tl.sum(tl.sum(grad * b[None, :], 1) * x, 0)
            ddecay = alpha * (dalpha + rest * step * dbeta)  # the gradient of -step * rate
            dstep = mix * dgamma + rest * alpha * dbeta - rate * ddecay
            dmix = step * dgamma - step * alpha * dbeta
            tl.store(ddt_ptr + (narrow + t) * H + h, dstep * slope)
            tl.store(dlam_ptr + (narrow + t) * H + h, dmix * mix * rest)
            total = total - decay * ddecay
            grad = alpha * grad
            late = rest * step * grad
            state = before
        tl.debug_barrier()  # the scratch memory is written again
    tl.store(dlog_ptr + (block * B + batch) * H + h, total)


def outputs_like(tensors, config):
    x, b = tensors["x"], tensors["b"]
    B, T, H, P = x.shape
    shape = (B, H, triton.cdiv(T, config["STEPS"]), P, b.shape[2])
    return {"y": torch.empty_like(x)}, {"kept": torch.empty(shape, dtype=torch.float32, device=x.device)}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    x, b = tensors["x"], tensors["b"]
    B, T, H, P = x.shape
    N = b.shape[2]
    if x.numel() > 0:
        _forward[(B * H, triton.cdiv(P, config["ROWS"]))](
            x, tensors["dt"], tensors["lam"], tensors["a_log"], b, tensors["c"], outputs["y"], saved["kept"],
            T, H, P, N, triton.cdiv(T, config["STEPS"]), config["STEPS"],
            ROWS=config["ROWS"], BN=triton.next_power_of_2(N), num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    x, dt, lam, a_log = tensors["x"], tensors["dt"], tensors["lam"], tensors["a_log"]
    b, c = tensors["b"], tensors["c"]
    B, T, H, P = x.shape
    N = b.shape[2]
    found = {
        "x": torch.zeros_like(x),
        "dt": torch.zeros_like(dt),
        "lam": torch.zeros_like(lam),
        "a_log": torch.zeros_like(a_log),
        "b": torch.zeros_like(b),
        "c": torch.zeros_like(c),
    }
    dy = grads["y"]
    if x.numel() > 0 and dy is not None:
        blocks = triton.cdiv(P, config["ROWS"])
        wide = {"dtype": torch.float32, "device": x.device}
        scratch = torch.empty((B * H, config["STEPS"], P, N), **wide)
        ddt, dlam = torch.empty((blocks, B, T, H), **wide), torch.empty((blocks, B, T, H), **wide)
        dlog = torch.empty((blocks * B, H), **wide)
        db, dc = torch.empty((blocks * H, B, T, N), **wide), torch.empty((blocks * H, B, T, N), **wide)
        _backward[(B * H, blocks)](
            x, dt, lam, a_log, b, c, dy, saved["kept"], scratch,
            found["x"], ddt, dlam, dlog, db, dc,
            B, T, H, P, N, triton.cdiv(T, config["STEPS"]), config["STEPS"],
            ROWS=config["ROWS"], BN=triton.next_power_of_2(N), num_warps=config["num_warps"],
        )
        found["dt"], found["lam"] = ddt.sum(0).to(dt.dtype), dlam.sum(0).to(lam.dtype)
        found["a_log"] = dlog.sum(0).to(a_log.dtype)
        found["b"], found["c"] = db.sum(0).to(b.dtype), dc.sum(0).to(c.dtype)
    return {name: found[name] for name in needs}


FAMILY = 'novel'
INPUTS = {'x': 'differentiable', 'dt': 'differentiable', 'lam': 'differentiable', 'a_log': 'differentiable', 'b': 'differentiable', 'c': 'differentiable'}
OUTPUTS = {'y': 'differentiable'}
SPEC_DIGEST = 'c4b9ec452376dad8'


def bucket(tensors):
    return {}
