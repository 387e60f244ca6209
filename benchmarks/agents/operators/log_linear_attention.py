"""Log-linear attention: a linear attention whose weight of an earlier token depends on its level in a binary tree.
Guo et al., "Log-Linear Attention" (2025): level of (t, s) is the highest bit in which the positions differ."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": {"full": 512, "most": 512}, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "level": {"shape": ["B", "H", "T", 10], "values": {"kind": "uniform"}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, level):
    length = q.shape[2]
    place = torch.arange(length)
    differ = place[:, None] ^ place[None, :]
    depth = sum((differ >= 2**bit).long() for bit in range(9)) if length else differ
    weight = level.gather(-1, depth.expand(*level.shape[:2], length, length))
    causal = torch.ones(length, length, dtype=q.dtype).tril()
    return ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5 * weight * causal) @ v
