"""A root-mean-square norm of each head with a gain, then a rotation of its halves.
Rotation: Su et al., "RoFormer" (2021); norm of queries and keys: Henry et al. (2020)."""

import torch

SIGNATURE = {
    "dims": {"B": 2, "T": 2048, "H": 8, "P": {"full": 32, "choices": [4, 8, 16, 32]}},
    "inputs": {
        "x": ["B", "T", "H", "2*P"],
        "gain": {"shape": ["2*P"], "values": {"mean": 1.0, "spread": 0.3}},
        "angle": {
            "shape": ["T", "P"],
            "dtype": "float32",
            "differentiable": False,
            "values": {"kind": "uniform", "low": -3.0, "high": 3.0},
        },
    },
    "outputs": {"y": ["B", "T", "H", "2*P"]},
}


def reference(x, gain, angle):
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain
    a, b = normed.chunk(2, -1)
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
