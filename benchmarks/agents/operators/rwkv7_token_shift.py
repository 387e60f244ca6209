"""RWKV-7's token shift with a low-rank gate: each channel mixes with the token before, by a gate that depends on both.
Peng et al., "RWKV-7 Goose" (2025), and RWKV-6's data-dependent linear interpolation."""

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "T": 2048, "C": 1024, "R": {"full": 32, "choices": [16, 32]}},
    "inputs": {
        "x": ["B", "T", "C"],
        "mu_base": {"shape": ["C"], "values": {"kind": "uniform"}},
        "mu": {"shape": ["C"], "values": {"kind": "uniform"}},
        "down": {"shape": ["C", "R"], "values": {"spread": 0.2}},
        "up": {"shape": ["R", "C"], "values": {"spread": 0.2}},
    },
    "outputs": {"y": ["B", "T", "C"]},
}


def reference(x, mu_base, mu, down, up):
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    change = before - x
    gate = torch.tanh((x + change * mu_base) @ down) @ up
    return x + change * (mu + gate)
