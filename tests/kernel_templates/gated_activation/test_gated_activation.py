"""The gated activation template against fp64: every activation, layout and clamp, forward and backward."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.gated_activation import cases, reference
from kernel_templates.gated_activation.op import op
from kernel_templates.gated_activation.spec import ACTIVATIONS, LAYOUTS, Spec

FLAGS = [
    {"activation": a, "layout": layout, "limit": (None, 2.0)[(i + j) % 2]}
    for (i, a), (j, layout) in itertools.product(enumerate(ACTIVATIONS), enumerate(LAYOUTS))
] + [{"activation": "silu", "layout": layout, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0} for layout in LAYOUTS]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _leaves(tensors, dtype=None):
    return {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def check(spec, tensors, dy):
    """The operator against fp64 within the tolerance table."""
    dtype = DTYPES[spec.dtype]
    runs = []
    for leaves, run in (
        (_leaves(tensors, torch.float64), lambda t: reference.reference(t, spec)["y"]),
        (_leaves(tensors, torch.float32), lambda t: reference.rounded_reference(t, spec, dtype, {})["y"]),
        (_leaves(tensors), lambda t: op(spec)(**t)[0]),
    ):
        y = run(leaves)
        grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
        runs.append({"y": y.detach(), **dict(zip(leaves, grads, strict=True))})
    exact, rounded, found = runs
    for name, expected in exact.items():
        gradient_of = None if name == "y" else name
        e = tolerance.relative_rms(rounded[name], expected)
        bound = tolerance.limit("gated_activation", dtype, e, gradient_of)
        tolerance.assert_close(f"{spec.words()} {name}", found[name], expected, bound)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "-".join(str(v) for v in f.values()))
def test_every_flag(flags):
    for dtype, count in (("bfloat16", 4), ("float32", 2), ("float16", 1)):
        spec = Spec(width=200, dtype=dtype, **flags)
        seed = zlib.crc32(f"{spec}".encode())
        generator = torch.Generator().manual_seed(seed)
        for case in cases.cases(spec, random.Random(seed), count, "interpreted"):
            tensors = cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu")
            dy = torch.randn((case.dims["rows"], case.dims["width"]), generator=generator).to(DTYPES[dtype])
            check(spec, tensors, dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clamps_pass_and_stop_gradients_exactly(layout):
    spec = Spec(width=5, layout=layout, limit=2.0, dtype="float32")
    gate = torch.tensor([[1.0, 2.0, 2.0000002, -9.0, 3.0]])
    up = torch.tensor([[-2.0, 2.0, -2.0000002, 5.0, 1.0]])
    if layout == "separate":
        tensors = _leaves({"gate": gate, "up": up})
    else:
        both = torch.cat([gate, up], -1) if layout == "concatenated" else torch.stack([gate, up], -1).flatten(-2)
        tensors = _leaves({"gate_up": both})
    op(spec)(**tensors)[0].sum().backward()
    if layout == "separate":
        dgate, dup = tensors["gate"].grad, tensors["up"].grad
    else:
        dgate, dup = reference.parted(tensors["gate_up"].grad, layout)
    assert (dgate != 0).tolist() == [[True, True, False, True, False]]
    assert (dup != 0).tolist() == [[True, True, False, False, True]]


def test_known_values():
    """gpt-oss: y = g sigmoid(1.702 g) (u + 1); relu2 is a square; gelu(1) = Phi(1)."""
    run = op(Spec(width=1, activation="silu", alpha=1.702, up_offset=1.0, limit=7.0, dtype="float32"))
    (y,) = run(gate=torch.tensor([[100.0]]), up=torch.tensor([[-100.0]]))
    assert y.item() == pytest.approx(7.0 / (1 + 2.718281828459045 ** (-1.702 * 7)) * (1 - 7), rel=1e-6)
    (y,) = op(Spec(width=1, activation="relu2", dtype="float32"))(gate=torch.tensor([[-3.0]]), up=torch.ones(1, 1))
    assert y.item() == 0.0
    (y,) = op(Spec(width=1, activation="gelu", dtype="float32"))(gate=torch.ones(1, 1), up=torch.ones(1, 1))
    assert y.item() == pytest.approx(0.8413447460685429, rel=1e-6)


def test_strides_and_leading_dims():
    spec = Spec(width=12, dtype="float32")
    fused = torch.randn(2, 5, 3, 24)
    check(spec, {"gate": fused[..., :12], "up": fused[..., 12:]}, torch.ones(()).expand(2, 5, 3, 12))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_nothing_to_do(shape):
    spec = Spec(width=8)
    gate, up = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    (y,) = op(spec)(gate=gate, up=up)
    y.sum().backward()
    assert y.shape == gate.grad.shape == up.grad.shape == shape


def test_nan_is_not_hidden_by_a_clamp():
    (y,) = op(Spec(width=2, limit=1.0))(
        gate=torch.tensor([[float("nan"), 1.0]]), up=torch.tensor([[1.0, float("nan")]])
    )
    assert y.isnan().all()
