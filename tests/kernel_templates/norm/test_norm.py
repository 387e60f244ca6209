"""The norm template against fp64, every flag, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.bind import bind, bind_template
from kernel_templates.norm import cases, reference, template
from kernel_templates.norm.op import op
from kernel_templates.norm.spec import Spec

FLAGS = [
    {"weighted": weighted, "offset": offset, "gate": gate, "residual": residual}
    for weighted, offset, gate, residual in itertools.product(
        (True, False), (True, False), ("none", "sigmoid", "silu"), (False, True)
    )
    if weighted or not offset
]
FLAGS += [
    {"weighted": True, "offset": False, "gate": "none", "residual": residual, "centred": True, "bias": bias}
    for residual, bias in itertools.product((False, True), (False, True))
]
FLAGS += [
    {"weighted": True, "offset": True, "gate": "sigmoid", "residual": False, "centred": True},
    {"weighted": False, "offset": False, "gate": "none", "residual": False, "centred": True},
    {"weighted": True, "offset": False, "gate": "none", "residual": False, "bias": True},
]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _id(flags):
    words = ["weight" if flags["weighted"] else "plain", "offset" * flags["offset"], flags["gate"]]
    words += ["centred" * flags.get("centred", False), "bias" * flags.get("bias", False)]
    return "-".join(filter(None, [*words, "residual" * flags["residual"]]))


def _leaves(tensors, dtype=None):
    return {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def _gradients(outputs, leaves, upstream):
    return dict(zip(leaves, torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream), strict=True))


def check(spec, tensors, upstream, run):
    """``run`` against fp64 within the tolerance table, outputs and gradients."""
    dtype = DTYPES[spec.dtype]
    exact = _leaves(tensors, torch.float64)
    expected = reference.reference(exact, spec)
    exact_grads = _gradients(expected, exact, [g.double() for g in upstream])
    own = _leaves(tensors, torch.float32)
    rounded = reference.rounded_reference(own, spec, dtype, {})
    own_grads = _gradients(rounded, own, [g.float() for g in upstream])

    leaves = _leaves(tensors)
    outputs = dict(zip(expected, run(**leaves), strict=True))
    grads = _gradients(outputs, leaves, upstream)
    for name in expected:
        e = tolerance.relative_rms(rounded[name], expected[name])
        tolerance.assert_close(name, outputs[name], expected[name], tolerance.limit("norm", dtype, e))
    for name in exact:
        assert grads[name].dtype == leaves[name].dtype
        e = tolerance.relative_rms(own_grads[name], exact_grads[name])
        bound = tolerance.limit("norm", dtype, e, gradient_of=name)
        tolerance.assert_close(f"grad {name}", grads[name], exact_grads[name], bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("flags", FLAGS, ids=_id)
def test_every_flag(flags, dtype):
    spec = Spec(hidden=320, dtype=dtype, **flags)
    seed = zlib.crc32(f"{spec}".encode())
    generator = torch.Generator().manual_seed(seed)
    for case in cases.cases(spec, random.Random(seed), 5, "interpreted"):
        tensors = cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu")
        shape = tensors["x"].shape
        upstream = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in spec.outputs()]
        check(spec, tensors, upstream, op(spec))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias):
    spec = Spec(hidden=100, dtype="float32", centred=True, bias=bias, eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    x = 3.0 + torch.randn(40, 100, generator=generator)
    tensors = {"x": x, "weight": torch.randn(100, generator=generator)}
    if bias:
        tensors["bias"] = torch.randn(100, generator=generator)
    leaves, wide = _leaves(tensors), _leaves(tensors, torch.float64)
    (y,) = op(spec)(**leaves)
    expected = torch.nn.functional.layer_norm(wide["x"], (100,), wide["weight"], wide.get("bias"), 1e-5)
    upstream = torch.randn(40, 100, generator=generator)
    tolerance.assert_close("y", y, expected, 1e-5)
    found, wanted = _gradients({"y": y}, leaves, [upstream]), _gradients({"y": expected}, wide, [upstream.double()])
    for name in tensors:
        tolerance.assert_close(name, found[name], wanted[name], 1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_more_programs_than_a_tile_of_shares_holds(bias):
    """300 programs of one row: their shares of the weight's gradient fill three tiles, the last in part."""
    spec = Spec(hidden=40, dtype="float32", centred=bias, bias=bias)
    config = {"forward_rows": 64, "forward_warps": 1, "backward_rows": 1, "backward_warps": 1,
              "backward_programs": 300, "backward_stages": 1}  # fmt: skip
    run = bind(bind_template(template, spec), name=f"norm_programs_{bias}", choose_config=lambda bucket, device: config)
    generator = torch.Generator().manual_seed(0)
    tensors = {role.name: torch.randn(40, generator=generator) for role in spec.inputs()}
    tensors["x"] = torch.randn(307, 40, generator=generator)
    check(spec, tensors, [torch.randn(307, 40, generator=generator)], run)


def test_fp16():
    spec = Spec(hidden=100, dtype="float16", gate="silu")
    x, gate, dy = (torch.randn(9, 100).half() for _ in range(3))
    check(spec, {"x": x, "weight": torch.randn(100).half(), "gate": gate}, [dy], op(spec))


def test_fp32_weight_with_bf16_rows():
    spec = Spec(hidden=64, offset=True)
    x = torch.randn(200, 64).bfloat16().requires_grad_()
    weight = torch.randn(64).requires_grad_()
    (y,) = op(spec)(x=x, weight=weight)
    y.backward(torch.ones_like(y))
    assert y.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    unit = x.detach().double() * torch.rsqrt(x.detach().double().square().mean(-1, keepdim=True) + spec.eps)
    # a sum over rows, kept in fp32: no rounding to bf16 anywhere on its way
    tolerance.assert_close("grad weight", weight.grad, unit.sum(0), 1e-5)


def test_strided_and_expanded_tensors():
    spec = Spec(hidden=48, gate="sigmoid", dtype="float32")
    fused = torch.randn(6, 10, 2, 48)
    weight = torch.randn(48)
    dy = torch.randn(1, 10, 48).expand(6, 10, 48)
    check(spec, {"x": fused[:, :, 0], "weight": weight, "gate": fused[:, :, 1]}, [dy], op(spec))
    check(spec, {"x": fused[:, :, 0].transpose(0, 1), "weight": weight, "gate": fused[:, :, 1].transpose(0, 1)},
          [torch.ones(()).expand(10, 6, 48)], op(spec))  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)])
def test_no_rows(shape):
    spec = Spec(hidden=64, residual=True)
    x, residual = torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True)
    weight = torch.randn(64, requires_grad=True)
    y, total = op(spec)(x=x, weight=weight, residual=residual)
    (y.sum() + total.sum()).backward()
    assert y.shape == total.shape == x.grad.shape == residual.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(64))


def test_only_the_residual_path_has_a_gradient():
    spec = Spec(hidden=32, residual=True)
    x, residual = torch.randn(5, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True)
    _, total = op(spec)(x=x, weight=torch.ones(32), residual=residual)
    upstream = torch.randn(5, 32)
    total.backward(upstream)
    assert torch.equal(x.grad, upstream)
    assert torch.equal(residual.grad, upstream)


def test_only_needed_gradients():
    spec = Spec(hidden=32)
    x = torch.randn(5, 32, requires_grad=True)
    weight = torch.randn(32)
    (y,) = op(spec)(x=x, weight=weight)
    y.sum().backward()
    assert weight.grad is None
    assert x.grad is not None


def test_invariance_under_scaling():
    """RMSNorm forgets the length of its row: doubling x (eps aside) changes nothing, exactly, in binary."""
    spec = Spec(hidden=129, eps=0.0, dtype="float32")
    x, weight = torch.randn(7, 129), torch.randn(129)
    assert torch.equal(op(spec)(x=x, weight=weight)[0], op(spec)(x=2 * x, weight=weight)[0])


def test_two_runs_are_bitwise_equal():
    spec = Spec(hidden=96, gate="silu")
    tensors = {"x": torch.randn(300, 96), "weight": torch.randn(96), "gate": torch.randn(300, 96)}
    runs = []
    for _ in range(2):
        leaves = _leaves(tensors, torch.bfloat16)
        (y,) = op(spec)(**leaves)
        y.square().sum().backward()
        runs.append([y.detach(), *(t.grad for t in leaves.values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_inputs_stay_as_they_were():
    spec = Spec(hidden=40, residual=True, gate="silu")
    tensors = {n: torch.randn(6, 40) for n in ("x", "gate", "residual")} | {"weight": torch.randn(40)}
    before = {n: t.clone() for n, t in tensors.items()}
    leaves = _leaves(tensors)
    y, total = op(spec)(**leaves)
    (y * total).sum().backward()
    assert all(torch.equal(leaves[n], before[n]) for n in before)


def test_hidden_size_too_large_is_refused():
    spec = Spec(hidden=1 << 21, weighted=False)
    with pytest.raises(ValueError, match="exceeds"):
        op(spec)(x=torch.empty(0, 1 << 21))


def test_cases_keep_their_promises():
    for level, count in (("interpreted", 6), ("compiled", 20)):
        for flags in FLAGS[:4]:
            spec = Spec(hidden=4096, **flags)
            found = cases.cases(spec, random.Random(0), count, level)
            assert len({c.name for c in found}) == count
            assert any(c.dims["rows"] == 0 for c in found)
            for case in found:
                made = cases.make_tensors(spec, case, torch.Generator().manual_seed(1), torch.bfloat16, "cpu")
                assert set(made) == {r.name for r in spec.inputs()}
    assert dataclasses.fields(found[0])
