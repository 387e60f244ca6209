"""A small operator that no family covers, with an honest kernel for it and wrong ones."""

from __future__ import annotations

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


BODY = '''"""y = relu(x)^2 * sigmoid(scale); the gradient of scale is summed over rows block by block."""

import torch
import triton
import triton.language as tl

CONFIGS = [{"ROWS": 32, "BLOCK": 64, "num_warps": 4}, {"ROWS": 16, "BLOCK": 128, "num_warps": 4}]
INTERPRETER = {"ROWS": 256, "BLOCK": 256, "num_warps": 1}


@triton.jit
def _forward(x_ptr, scale_ptr, y_ptr, N, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    r = tl.maximum(x, 0.0)
    y = r * r * tl.sigmoid(s)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy_ptr, x_ptr, scale_ptr, dx_ptr, ds_ptr, N, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.sigmoid(tl.load(scale_ptr + col, mask=col < D, other=0.0).to(tl.float32))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < N)[:, None] & (col < D)[None, :]
        at = row[:, None] * D + col[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.maximum(x, 0.0)
        tl.store(dx_ptr + at, (2.0 * dy * r * s[None, :]).to(dx_ptr.dtype.element_ty), mask=inside)
        total += tl.sum(dy * r * r, axis=0)
    tl.store(ds_ptr + col, (total * s * (1.0 - s)).to(ds_ptr.dtype.element_ty), mask=col < D)


def outputs_like(tensors, config):
    return {"y": torch.empty_like(tensors["x"])}, {}


def forward(tensors, config):
    outputs, saved = outputs_like(tensors, config)
    x = tensors["x"]
    N, D = x.shape
    if x.numel() > 0:
        grid = (triton.cdiv(N, config["ROWS"]), triton.cdiv(D, config["BLOCK"]))
        _forward[grid](
            x, tensors["scale"], outputs["y"], N, D,
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, config):
    x = tensors["x"]
    N, D = x.shape
    dx, ds = torch.empty_like(x), torch.zeros_like(tensors["scale"])
    if x.numel() > 0:
        _backward[(triton.cdiv(D, config["BLOCK"]),)](
            grads["y"], x, tensors["scale"], dx, ds, N, D,
            ROWS=config["ROWS"], BLOCK=config["BLOCK"], num_warps=config["num_warps"],
        )
    found = {"x": dx, "scale": ds}
    return {name: found[name] for name in needs}
'''

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
