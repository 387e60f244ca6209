"""Causal attention with a polynomial kernel of degree four, the exact function that polynomial sketches approximate.
Kacham et al., "PolySketchFormer" (2023), section 2: weights (q.k)^4, normalised by one plus their sum."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {"q": ["B", "H", "T", "D"], "k": ["B", "H", "T", "D"], "v": ["B", "H", "T", "D"]},
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v):
    length = q.shape[2]
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    weight = scores.square().square() * torch.ones(length, length, dtype=q.dtype).tril()
    return (weight @ v) / (1 + weight.sum(-1, keepdim=True))
