"""Differential attention: the difference of two causal softmax maps, weighted by a learnt factor for each head.
Ye et al., "Differential Transformer" (2024), equation 1."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q1": ["B", "H", "T", "D"],
        "k1": ["B", "H", "T", "D"],
        "q2": ["B", "H", "T", "D"],
        "k2": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "lam": {"shape": ["H"], "values": {"mean": 0.5, "spread": 0.2}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q1, k1, q2, k2, v, lam):
    length = v.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def weights(q, k):
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~causal, -math.inf).softmax(-1)

    return (weights(q1, k1) - lam[:, None, None] * weights(q2, k2)) @ v
