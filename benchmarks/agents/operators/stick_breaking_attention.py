"""Stick-breaking attention: a token takes a share of what later tokens left, from the newest to the oldest.
Tan et al., "Scaling Stick-Breaking Attention" (2024)."""

import math

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": {"full": 2048, "least": 2}, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {"q": ["B", "H", "T", "D"], "k": ["B", "H", "T", "D"], "v": ["B", "H", "T", "D"]},
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v):
    length = q.shape[2]
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    earlier = torch.ones(length, length, dtype=torch.bool).tril(-1)
    left = torch.where(earlier, F.logsigmoid(-scores), torch.zeros_like(scores))
    # what is left after all keys between s and t
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    weight = torch.where(earlier, (F.logsigmoid(scores) + after).exp(), torch.zeros_like(scores))
    return weight @ v
