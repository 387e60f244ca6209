"""Hyper-connections against transformers' own modules in fp64 and against fp64 autograd: every output and gradient."""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.case import Case
from kernel_templates.hyper_connection import cases, reference, template
from kernel_templates.hyper_connection.op import op
from kernel_templates.hyper_connection.spec import Spec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FLAGS = {
    "manifold": {},
    "independent": {"rounds": 0, "post_factor": 1.5, "post_floor": 1e-3},
    "head": {"rounds": 0, "post": False},
    "two streams, one round": {"streams": 2, "rounds": 1},
    "three streams": {"streams": 3, "rounds": 6, "floor": 1e-3},
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def differentiate(run, tensors, upstream, dtype=None):
    """Outputs and gradients of ``run`` by autograd, on copies in ``dtype``."""
    leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in tensors.items()}
    outputs = run(leaves)
    grads = torch.autograd.grad(
        list(outputs.values()),
        list(leaves.values()),
        [upstream[n].to(x.dtype) for n, x in outputs.items()],
        materialize_grads=True,
    )
    return {**outputs, **{f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}}


def run_op(spec):
    return lambda tensors: dict(zip([r.name for r in spec.outputs()], op(spec)(**tensors), strict=True))


def draw_upstream(spec, tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    like, _ = template.outputs_like(tensors, spec, {})
    return {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in like.items()}


def check(spec, tensors, upstream, run):
    dtype = DTYPES[spec.dtype]
    exact = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    rounded = differentiate(lambda t: reference.rounded_reference(t, spec, dtype, {}), tensors, upstream, torch.float32)
    found = differentiate(run, tensors, upstream)
    for name, value in exact.items():
        e = tolerance.relative_rms(rounded[name], value)
        gradient_of = name.removeprefix("grad ") if name.startswith("grad ") else None
        tolerance.assert_close(name, found[name], value, tolerance.limit("hyper_connection", dtype, e, gradient_of))


@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next", "hy_v4", "head"])
def test_the_reference_is_transformers_module(kind):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4
    from transformers.models.glm5_next import modeling_glm5_next
    from transformers.models.hy_v4 import modeling_hy_v4

    n, hidden = 4, 12
    config = SimpleNamespace(
        hc_mult=n, hidden_size=hidden, hc_eps=1e-4, rms_norm_eps=1e-5, hc_sinkhorn_iters=5, hc_magnitude=1.7
    )
    make, flags = {
        "deepseek_v4": (modeling_deepseek_v4.DeepseekV4HyperConnection, {"rounds": 5}),
        "glm5_next": (modeling_glm5_next.Glm5NextTextHyperConnection, {"rounds": 5}),
        "hy_v4": (modeling_hy_v4.HYV4HyperConnection, {"rounds": 0, "post_factor": 1.7, "post_floor": 1e-4}),
        "head": (modeling_deepseek_v4.DeepseekV4HyperHead, {"rounds": 0, "post": False}),
    }[kind]
    spec = Spec(hidden=hidden, streams=n, eps=1e-5, floor=1e-4, dtype="float32", **flags)
    case = Case(name="", dims={"batch": 2, "tokens": 7, "hidden": hidden}, distribution="normal")
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(3), torch.float32, "cpu")
    prefix = "hc_" if kind == "head" else ""
    # the modules call .float(): in fp32 they are their own peers, to fp32 rounding
    module = make(config)
    upstream = draw_upstream(spec, tensors, 5)

    def theirs(t):
        values = {prefix + name: t[name] for name in ("fn", "base", "scale")}
        found = torch.func.functional_call(module, values, (t["x"],))
        names = {"hy_v4": ("post", "h"), "head": ("h",)}.get(kind, ("post", "comb", "h"))
        return dict(zip(names, (found,) if kind == "head" else found, strict=True))

    ours = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    for name, value in differentiate(theirs, tensors, upstream).items():
        tolerance.assert_close(name, value, ours[name], 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_flag(flags, dtype):
    spec = Spec(hidden=48, dtype=dtype, **flags)
    seed = zlib.crc32(f"{spec}".encode())
    generator = torch.Generator().manual_seed(seed)
    for i, case in enumerate(cases.cases(spec, random.Random(seed), 7, "interpreted")):
        tensors = cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu")
        check(spec, tensors, draw_upstream(spec, tensors, seed + i), run_op(spec))


def test_comb_is_doubly_stochastic():
    spec = Spec(hidden=16, dtype="float32", floor=1e-7)
    case = Case(name="", dims={"batch": 1, "tokens": 50, "hidden": 16}, distribution="normal")
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(0), torch.float32, "cpu")
    _, _, comb = op(spec)(**tensors)
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(-2), torch.ones(1, 50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(comb.sum(-1), torch.ones(1, 50, 4), atol=1e-3, rtol=0)


@pytest.mark.parametrize("only", ["h", "post", "comb"])
def test_a_gradient_into_one_output_only(only):
    spec = Spec(hidden=20, dtype="float32", rounds=4)
    case = Case(name="", dims={"batch": 1, "tokens": 21, "hidden": 20}, distribution="normal")
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(1), torch.float32, "cpu")
    upstream = draw_upstream(spec, tensors, 2)
    run = run_op(spec)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    found = torch.autograd.grad(run(leaves)[only], list(leaves.values()), upstream[only])
    exact = {n: x.double().requires_grad_() for n, x in tensors.items()}
    wanted = torch.autograd.grad(reference.reference(exact, spec)[only], list(exact.values()), upstream[only].double())
    for name, a, b in zip(leaves, found, wanted, strict=True):
        tolerance.assert_close(name, a, b, tolerance.FLOORS[torch.float32])


def test_many_tiles_and_splits():
    """Tiles that do not divide the tokens, columns in blocks, several partial sums of the parameters' gradients."""
    spec = Spec(hidden=40, dtype="float32", rounds=3)
    case = Case(name="", dims={"batch": 1, "tokens": 75, "hidden": 40}, distribution="normal")
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(1), torch.float32, "cpu")
    config = {
        "mix_tokens": 16, "mix_columns": 32, "mix_warps": 4, "coefficient_tokens": 16, "coefficient_warps": 4,
        "stream_tokens": 4, "stream_columns": 16, "stream_warps": 4, "gradient_tokens": 16, "gradient_columns": 16,
        "gradient_splits": 3, "gradient_warps": 4, "gradient_stages": 2,
    }  # fmt: skip
    upstream = draw_upstream(spec, tensors, 3)
    outputs, saved = template.forward(tensors, spec, config)
    grads = template.backward(tensors, saved, upstream, set(tensors), spec, config)
    exact = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    for name, value in {**outputs, **{f"grad {n}": g for n, g in grads.items()}}.items():
        tolerance.assert_close(name, value, exact[name], tolerance.FLOORS[torch.float32])


def test_two_runs_are_bitwise_equal_and_inputs_stay():
    spec = Spec(hidden=24)
    case = Case(name="", dims={"batch": 2, "tokens": 70, "hidden": 24}, distribution="normal")
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(1), torch.bfloat16, "cpu")
    before = {n: t.clone() for n, t in tensors.items()}
    upstream = draw_upstream(spec, tensors, 2)
    first, second = (differentiate(run_op(spec), tensors, upstream) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(torch.equal(tensors[n], before[n]) for n in before)


def test_no_tokens():
    spec = Spec(hidden=16, dtype="float32")
    x = torch.randn(2, 0, 4, 16, requires_grad=True)
    fn, base, scale = (torch.randn(shape, requires_grad=True) for shape in ((24, 64), (24,), (3,)))
    h, post, comb = op(spec)(x=x, fn=fn, base=base, scale=scale)
    (h.sum() + post.sum() + comb.sum()).backward()
    assert (h.shape, post.shape, comb.shape) == ((2, 0, 16), (2, 0, 4), (2, 0, 4, 4))
    assert not fn.grad.any()
    assert not base.grad.any()
    assert not scale.grad.any()


def test_another_number_of_streams_is_refused():
    spec = Spec(hidden=16)
    with pytest.raises(ValueError, match="streams"):
        op(spec)(x=torch.randn(1, 2, 3, 16), fn=torch.randn(24, 64), base=torch.randn(24), scale=torch.randn(3))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"streams": 9}, "streams"), ({"rounds": -1}, "rounds"), ({"post": False}, "comb"), ({"hidden": 0}, "hidden")],
)
def test_impossible_specs_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Spec(**{"hidden": 16, **wrong})
