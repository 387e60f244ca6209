"""Attention in a window of 64 tokens with a slope for each head that punishes distance.
Press et al., "Train Short, Test Long" (2021); the window as in Mistral (2023); slopes are learnt here."""

import math

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "slope": {"shape": ["H"], "values": {"spread": 0.2}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, slope):
    length = q.shape[2]
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    scores = scores - slope.exp()[:, None, None] * distance.to(q.dtype)
    seen = (distance >= 0) & (distance < 64)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
