"""Gated slot attention: two gated memories of slots, read by a softmax over slots.
Zhang et al., "Gated Slot Attention" (2024), equations 6 to 8."""

import torch

SIGNATURE = {
    "dims": {
        "B": 2,
        "H": 4,
        "T": 1024,
        "D": {"full": 64, "choices": [16, 32, 64]},
        "M": {"full": 64, "choices": [16, 32, 64]},
    },
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "g": {"shape": ["B", "H", "T", "M"], "values": {"kind": "log_sigmoid", "mean": 2.0}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, g):
    keep = g.exp()
    keys = q.new_zeros(*q.shape[:2], keep.shape[-1], q.shape[-1])
    values = torch.zeros_like(keys)
    out = []
    for t in range(q.shape[2]):
        a = keep[:, :, t, :, None]
        keys = a * keys + (1 - a) * k[:, :, t, None, :]
        values = a * values + (1 - a) * v[:, :, t, None, :]
        weight = (keys * q[:, :, t, None, :]).sum(-1).softmax(-1)
        out.append((weight[..., None] * values).sum(-2))
    return torch.stack(out, 2) if out else q * 0
