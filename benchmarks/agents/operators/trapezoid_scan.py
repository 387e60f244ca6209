"""A state-space scan with the trapezoidal rule of Mamba-3: the state takes in this token and the one before.
Lahoti et al., "Mamba-3" (2025): h_t = a_t h_{t-1} + b_t B_{t-1} x_{t-1} + g_t B_t x_t."""

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {
        "B": 2,
        "T": 2048,
        "H": 8,
        "P": {"full": 64, "choices": [16, 32, 64]},
        "N": {"full": 64, "choices": [16, 32, 64]},
    },
    "inputs": {
        "x": ["B", "T", "H", "P"],
        "dt": {"shape": ["B", "T", "H"], "values": {"mean": -1.0}},
        "lam": ["B", "T", "H"],
        "a_log": {"shape": ["H"], "values": {"spread": 0.5}},
        "b": ["B", "T", "N"],
        "c": ["B", "T", "N"],
    },
    "outputs": {"y": ["B", "T", "H", "P"]},
}


def reference(x, dt, lam, a_log, b, c):
    step, mix = F.softplus(dt), torch.sigmoid(lam)
    alpha = torch.exp(-step * a_log.exp())
    beta, gamma = (1 - mix) * step * alpha, mix * step
    taken = x[..., :, None] * b[:, :, None, None, :]
    state = torch.zeros_like(taken[:, 0])
    before = torch.zeros_like(state)
    out = []
    for t in range(x.shape[1]):
        a, bt, g = (s[:, t, :, None, None] for s in (alpha, beta, gamma))
        state = a * state + bt * before + g * taken[:, t]
        before = taken[:, t]
        out.append((state * c[:, t, None, None, :]).sum(-1))
    return torch.stack(out, 1) if out else x * 0
