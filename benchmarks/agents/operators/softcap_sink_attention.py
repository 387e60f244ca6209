"""Causal attention with capped scores and a learnt sink for each head that takes part in the softmax and gives nothing.
Cap: Gemma 2 (2024); sink: gpt-oss (2025)."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {"q": ["B", "H", "T", "D"], "k": ["B", "H", "T", "D"], "v": ["B", "H", "T", "D"], "sink": ["H"]},
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, sink):
    length = q.shape[2]
    scores = 30.0 * torch.tanh((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) / 30.0)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal, -math.inf)
    extra = sink[None, :, None, None].expand(q.shape[0], -1, length, 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v
