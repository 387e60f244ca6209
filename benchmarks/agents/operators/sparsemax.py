"""The Euclidean projection onto the simplex in place of the softmax: many weights are exactly zero.
Martins and Astudillo, "From Softmax to Sparsemax" (2016), algorithm 1."""

import torch

SIGNATURE = {
    "dims": {"N": 2048, "C": {"full": 512, "least": 2, "most": 512}},
    "inputs": {"x": ["N", "C"]},
    "outputs": {"y": ["N", "C"]},
}


def reference(x):
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    total = ordered.cumsum(-1)
    kept = (1 + count * ordered > total).sum(-1, keepdim=True)
    threshold = (total.gather(-1, kept - 1) - 1) / kept
    return torch.relu(x - threshold)
