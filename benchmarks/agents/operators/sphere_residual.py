"""The residual step of the normalised Transformer: towards the layer's output along the unit sphere.
Loshchilov et al., "nGPT" (2024), equations 10 and 11."""

import torch

SIGNATURE = {
    "dims": {"N": 4096, "C": {"full": 2048, "least": 2}},
    "inputs": {"x": ["N", "C"], "layer": ["N", "C"], "rate": {"shape": ["C"], "values": {"mean": 0.3, "spread": 0.1}}},
    "outputs": {"y": ["N", "C"]},
}


def reference(x, layer, rate):
    def unit(t):
        return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)

    return unit(x + rate * (unit(layer) - x))
