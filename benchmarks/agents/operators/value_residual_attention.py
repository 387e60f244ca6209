"""Causal softmax attention whose values are mixed with those of the first layer, by a learnt share for each head.
Zhou et al., "Value Residual Learning" (2024)."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "v_first": ["B", "H", "T", "D"],
        "share": ["H"],
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, v_first, share):
    length = q.shape[2]
    part = torch.sigmoid(share)[:, None, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~causal, -math.inf).softmax(-1) @ (part * v + (1 - part) * v_first)
