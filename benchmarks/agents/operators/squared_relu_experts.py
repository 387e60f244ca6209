"""Routed experts with squared ReLU and a root-mean-square norm with weights of its own inside each expert.
Squared ReLU: So et al., "Primer" (2021); norm before the expert's down projection as in recent sparse models."""

import torch

SIGNATURE = {
    "dims": {
        "N": 512,
        "C": {"full": 256, "choices": [16, 32, 48, 256]},
        "W": {"full": 256, "choices": [16, 32, 256]},
        "E": {"full": 16, "choices": [3, 4, 16]},
    },
    "inputs": {
        "x": ["N", "C"],
        "index": {"shape": ["N", 2], "dtype": "int64", "values": {"kind": "distinct", "high": "E"}},
        "scores": {"shape": ["N", 2], "values": {"kind": "softmax"}},
        "up": {"shape": ["E", "C", "W"], "values": {"spread": 0.2}},
        "down": {"shape": ["E", "W", "C"], "values": {"spread": 0.2}},
        "gain": {"shape": ["E", "W"], "values": {"mean": 1.0, "spread": 0.2}},
    },
    "outputs": {"y": ["N", "C"]},
}


def reference(x, index, scores, up, down, gain):
    inner = torch.relu(torch.einsum("nc,ecw->enw", x, up)).square()
    inner = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + 1e-6) * gain[:, None, :]
    each = torch.einsum("enw,ewc->nec", inner, down)
    chosen = each.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
    return (scores[..., None] * chosen).sum(1)
