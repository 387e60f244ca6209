"""The real-gated linear recurrent unit of Griffin: a diagonal recurrence whose input is scaled to keep the norm.
De et al., "Griffin" (2024), equations 1 to 4, c = 8."""

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "T": 2048, "C": 1024},
    "inputs": {
        "x": ["B", "T", "C"],
        "r": ["B", "T", "C"],
        "i": ["B", "T", "C"],
        "lam": {"shape": ["C"], "values": {"mean": -1.0, "spread": 0.5}},
    },
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(x, r, i, lam):
    log_a = -8.0 * F.softplus(lam) * torch.sigmoid(r)
    decay, scale = log_a.exp(), torch.sqrt(1 - (2 * log_a).exp())
    taken = scale * torch.sigmoid(i) * x
    state, out = torch.zeros_like(x[:, 0]) if x.shape[1] else None, []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + taken[:, t]
        out.append(state)
    return torch.stack(out, 1) if out else x * 0
