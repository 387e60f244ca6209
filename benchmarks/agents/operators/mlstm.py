"""The matrix LSTM of xLSTM in its parallel, stabilised form: exponential input gates, sigmoid forget gates.
Beck et al., "xLSTM" (2024), equations 19 to 27 and appendix A.3."""

import math

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {"B": 2, "H": 8, "T": 2048, "D": {"full": 64, "choices": [16, 32, 64]}},
    "inputs": {
        "q": ["B", "H", "T", "D"],
        "k": ["B", "H", "T", "D"],
        "v": ["B", "H", "T", "D"],
        "i": ["B", "H", "T"],
        "f": {"shape": ["B", "H", "T"], "values": {"mean": 3.0}},
    },
    "outputs": {"o": ["B", "H", "T", "D"]},
}


def reference(q, k, v, i, f):
    length = q.shape[2]
    decay = F.logsigmoid(f).cumsum(-1)
    weight = decay[..., :, None] - decay[..., None, :] + i[..., None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    weight = weight.masked_fill(~causal, -math.inf)
    largest = weight.amax(-1, keepdim=True)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) * (weight - largest).exp()
    norm = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-largest).exp())
    return (scores @ v) / norm
