"""Forgetting attention: softmax attention whose scores lose the sum of forget gates between key and query.
Lin et al., "Forgetting Transformer" (2025)."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "g": {"shape": ["B", "H", "T"], "values": {"kind": "log_sigmoid", "mean": 3.0}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, g):
    length = q.shape[2]
    total = g.cumsum(-1)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + total[..., :, None] - total[..., None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return scores.masked_fill(~causal, -math.inf).softmax(-1) @ v
