"""Cross attention to one tensor that serves all heads and layers as keys (normed, with a gain) and values.
Sun et al., "You Only Cache Once" (2024), with one tensor for keys and values."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 1024, "S": 1024, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "kv": ["B", "S", "D"],
        "gain": {"shape": ["D"], "values": {"mean": 1.0, "spread": 0.2}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, kv, gain):
    keys = kv * torch.rsqrt(kv.square().mean(-1, keepdim=True) + 1e-6) * gain
    scores = torch.einsum("bhtd,bsd->bhts", q, keys) / math.sqrt(q.shape[-1])
    return torch.einsum("bhts,bsd->bhtd", scores.softmax(-1), kv)
