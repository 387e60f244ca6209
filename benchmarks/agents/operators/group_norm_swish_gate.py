"""The output of retention: a norm of each head without a mean's loss, gain and shift, gated by swish.
Sun et al., "Retentive Network" (2023), equation 8."""

import torch
from torch.nn import functional as F

SIGNATURE = {
    "dims": {"N": 4096, "H": 8, "D": {"full": 128, "choices": [3, 16, 31, 64, 128]}},
    "inputs": {
        "x": ["N", "H", "D"],
        "gate": ["N", "H", "D"],
        "gain": {"shape": ["H", "D"], "values": {"mean": 1.0, "spread": 0.2}},
        "shift": ["H", "D"],
    },
    "outputs": {"y": ["N", "H", "D"]},
}


def reference(x, gate, gain, shift):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return (normed * gain + shift) * F.silu(gate)
