"""Causal attention with a sigmoid in place of the softmax, its bias the negative logarithm of the length so far.
Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention" (2024)."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {"q": ["B", "H", "T", "D"], "k": ["B", "H", "T", "D"], "v": ["B", "H", "T", "D"]},
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v):
    length = q.shape[2]
    bias = torch.arange(1, length + 1, dtype=q.dtype).log()[:, None]
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) - bias
    causal = torch.ones(length, length, dtype=q.dtype).tril()
    return (torch.sigmoid(scores) * causal) @ v
