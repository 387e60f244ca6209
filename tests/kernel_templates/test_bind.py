"""The custom op: schema, strides, aliases, missing gradients, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_templates.bind import bind, bind_template
from kernel_templates.norm.op import op as norm_op
from kernel_templates.norm.spec import Spec as NormSpec
from kernel_templates.spec import OperatorSpec, TensorRole

SEEN: list[dict] = []


class Scale:
    """y = a x + b, z = x (an alias of its input); backward written by hand, and it keeps notes."""

    FAMILY = "scale"
    INPUTS = {"x": "differentiable", "a": "differentiable", "b": "differentiable optional", "index": "optional"}  # noqa: RUF012
    OUTPUTS = {"y": "differentiable", "z": "differentiable"}  # noqa: RUF012

    @staticmethod
    def outputs_like(tensors, config):
        x = tensors["x"]
        return {"y": torch.empty_like(x), "z": torch.empty_like(x)}, {"twice": torch.empty_like(x)}

    @staticmethod
    def forward(tensors, config):
        x = tensors["x"]
        assert all(t is None or t.is_contiguous() for t in tensors.values())
        y = tensors["a"] * x if tensors["b"] is None else tensors["a"] * x + tensors["b"]
        return {"y": y, "z": x}, {"twice": 2 * x}

    @staticmethod
    def backward(tensors, saved, grads, needs, config):
        SEEN.append({"needs": set(needs), "grads": {n: g is not None for n, g in grads.items()}, "config": config})
        dy = torch.zeros_like(tensors["x"]) if grads["y"] is None else grads["y"]
        assert dy.is_contiguous()
        dx = dy * tensors["a"] + (0 if grads["z"] is None else grads["z"])
        return {"x": dx, "a": (dy * saved["twice"] / 2).sum(0), "b": dy}

    @staticmethod
    def bucket(tensors):
        return {"n": tensors["x"].shape[-1]}


@pytest.fixture
def scale():
    SEEN.clear()
    return bind(Scale, name="scale.test-op", choose_config=lambda bucket, device: {"tile": bucket["n"]})


def test_values_and_gradients(scale):
    x, a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True), torch.randn(3, 4)
    y, z = scale(x=x, a=a, b=b)
    assert torch.equal(y, a * x + b)
    dy, dz = torch.randn(3, 4), torch.randn(3, 4)
    dx, da = torch.autograd.grad([y, z], [x, a], [dy, dz])
    torch.testing.assert_close(dx, dy * a + dz)
    torch.testing.assert_close(da, (dy * x).sum(0))
    assert SEEN[0] == {"needs": {"x", "a"}, "grads": {"y": True, "z": True}, "config": {"tile": 4}}


def test_results_never_alias_inputs_or_each_other(scale):
    x, a, b = torch.randn(3, 4, requires_grad=True), torch.ones(4), torch.randn(3, 4, requires_grad=True)
    y, z = scale(x=x, a=a, b=b)
    assert torch.equal(z, x)
    assert z.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    dy = torch.randn(3, 4)
    _, db = torch.autograd.grad(y, [x, b], dy)
    assert torch.equal(db, dy)
    assert db.untyped_storage().data_ptr() != dy.untyped_storage().data_ptr()


def test_missing_upstream_gradient_reaches_the_kernel_as_none(scale):
    x = torch.randn(3, 4, requires_grad=True)
    _, z = scale(x=x, a=torch.ones(4))
    z.backward(torch.ones(3, 4))
    assert SEEN[0]["grads"] == {"y": False, "z": True}
    assert torch.equal(x.grad, torch.ones(3, 4))


def test_any_strides(scale):
    x = torch.randn(4, 6, requires_grad=True)
    a = torch.randn(8)[::2]
    y, _ = scale(x=x[:, ::2].T, a=a)
    assert torch.equal(y, a * x[:, ::2].T)
    y.backward(torch.ones(1, 1).expand(3, 4))
    expected = torch.zeros(4, 6)
    expected[:, ::2] = a[:, None]
    torch.testing.assert_close(x.grad, expected)


def test_wrong_names_are_refused(scale):
    with pytest.raises(TypeError, match=r"no input 'w'.*'a' is missing"):
        scale(x=torch.ones(1), w=torch.ones(1))


def test_no_gradients_no_backward(scale):
    with torch.no_grad():
        y, _ = scale(x=torch.ones(2, 2, requires_grad=True), a=torch.ones(2))
    assert not y.requires_grad


def test_a_taken_name_gets_a_number(scale):
    again = bind(Scale, name="scale.test-op", choose_config=lambda bucket, device: {})
    assert again.name != scale.name
    assert again.name.startswith("scale_test_op_")


class _Spec(OperatorSpec):
    family = "scale"

    def inputs(self):
        return (TensorRole(name="x"), TensorRole(name="cu", differentiable=False, optional=True))

    def outputs(self):
        return (TensorRole(name="y"),)


def test_template_roles():
    bound = bind_template(Scale, _Spec())
    assert bound.INPUTS == {"x": "differentiable", "cu": "optional"}
    assert bound.OUTPUTS == {"y": "differentiable"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_compiled_equals_eager():
    spec = NormSpec(hidden=32, residual=True, gate="silu")
    run = norm_op(spec)

    def step(x: Tensor, weight: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        y, total = run(x=x * 2, weight=weight, gate=gate, residual=residual)
        return (y.float() * total.float()).sum()

    def gradients(function) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((6, 32), (32,), (6, 32), (6, 32))]
        loss = function(*leaves)
        loss.backward()
        return [loss, *(t.grad for t in leaves)]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for eager, graph in zip(gradients(step), gradients(compiled), strict=True):
        assert torch.equal(eager, graph)


class _Names(TorchDispatchMode):
    """Names of the operators that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("x", "weight")])
def test_both_paths_are_equal(residual, frozen):
    """Plain tensors go straight to the kernels, watched ones through the custom op: the same bits and strides."""
    run = norm_op(NormSpec(hidden=32, residual=residual, gate="silu"))
    names = ("x", "weight", "gate") + ("residual",) * residual

    def step() -> list[Tensor | None]:
        torch.manual_seed(0)
        tensors = {n: torch.randn((32,) if n == "weight" else (32, 6), dtype=torch.bfloat16) for n in names}
        tensors = {n: t if n == "weight" else t.T for n, t in tensors.items()}
        leaves = [t.requires_grad_(n not in frozen) for n, t in tensors.items()]
        outputs = run(**tensors)
        torch.autograd.backward(outputs, [torch.ones(6, 1, dtype=o.dtype).expand(6, 32) for o in outputs])
        return [*outputs, *(t.grad for t in leaves)]

    direct = step()
    with _Names() as seen:
        watched = step()
    assert [n for n in seen.names if "onboard" in n] == [
        f"onboard.{run.name}.default",
        f"onboard.{run.name}_backward.default",
    ]
    for a, b in zip(direct, watched, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)


def test_fake_and_meta_tensors_run_no_kernel(scale):
    with FakeTensorMode():
        y, z = scale(x=torch.empty(3, 4, requires_grad=True), a=torch.empty(4))
        assert y.shape == z.shape == (3, 4)
    (y, _) = scale(x=torch.empty(3, 4, device="meta"), a=torch.empty(4, device="meta"))
    assert y.is_meta
    y, _ = scale(x=torch.empty(3, 4, device="meta", requires_grad=True), a=torch.empty(4, device="meta"))
    y.sum().backward()
    assert SEEN == []


def test_second_derivatives_are_refused(scale):
    x = torch.randn(3, 4, requires_grad=True)
    y, _ = scale(x=x, a=torch.ones(4, requires_grad=True))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_saved_output_that_is_overwritten_is_noticed():
    run = norm_op(NormSpec(hidden=16, residual=True))
    x, residual = torch.randn(3, 16, requires_grad=True), torch.randn(3, 16)
    y, total = run(x=x, weight=torch.ones(16), residual=residual)
    with torch.no_grad():
        total.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_opcheck():
    """torch's own conformance test: schema, fake kernel, autograd registration, dynamic shapes."""
    spec = NormSpec(hidden=16, residual=True)
    tensors = [torch.randn(s, requires_grad=True) for s in ((3, 16), (16,), (3, 16))]
    run = norm_op(spec)
    torch.library.opcheck(run._forward_op, tuple(tensors))
