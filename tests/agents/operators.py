"""A small operator that no family covers, with an honest kernel for it and wrong ones."""

from __future__ import annotations

from agents.roles import examples
from kernel_templates.novel import Dim, NovelSpec, Signature, TensorSignature, Values

REFERENCE = '''"""Squared ReLU of x, gated by a scale for each channel."""
import torch

def reference(x, scale):
    return torch.relu(x).square() * torch.sigmoid(scale)
'''

SIGNATURE = Signature(
    dims={"N": Dim(full=4096), "D": Dim(full=256)},
    inputs=(
        TensorSignature(name="x", shape=("N", "D")),
        TensorSignature(name="scale", shape=("D",), values=Values(mean=1.0)),
    ),
    outputs=(TensorSignature(name="y", shape=("N", "D")),),
)


def spec() -> NovelSpec:
    return NovelSpec(name="gated squared relu", source=REFERENCE, signature=SIGNATURE.to_json())


# the example that authors are shown: it has to be right
BODY = examples.load("rows").kernel

WRONG_GRADIENT = BODY.replace("2.0 * dy * r", "dy * r")
NO_MASK = BODY.replace("mask=(row < N)[:, None] & (col < D)[None, :]", "mask=None")
TORCH_DOES_IT = (
    BODY[: BODY.index("def forward")]
    + """
def forward(tensors, config):
    return {"y": torch.relu(tensors["x"]).square() * torch.sigmoid(tensors["scale"])}, {}


def backward(tensors, saved, grads, needs, config):
    x, s = tensors["x"], torch.sigmoid(tensors["scale"])
    r = torch.relu(x)
    found = {"x": 2 * r * s * grads["y"], "scale": (grads["y"] * r * r).sum(0) * s * (1 - s)}
    return {name: found[name] for name in needs}
"""
)
