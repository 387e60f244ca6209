"""The short convolution against torch's own conv1d in fp64: every flag, output and gradient."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from torch.nn import functional as F

from kernel_templates import tolerance
from kernel_templates.case import Case
from kernel_templates.short_convolution import cases, reference, template
from kernel_templates.short_convolution.op import op
from kernel_templates.short_convolution.spec import Spec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


FLAGS = {
    "kimi": {},
    "mamba": {"bias": True},
    "lfm": {"activation": "none", "width": 3, "bias": True},
    "states": {"states": True},
    "wide": {"states": True, "width": 7, "bias": True, "activation": "none"},
    "narrow": {"width": 2, "states": True},
}


def differentiate(run, tensors, upstream, dtype=None):
    """Outputs and gradients of ``run`` by autograd, on copies in ``dtype``."""
    names = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    leaves = {n: tensors[n].detach().to(dtype or tensors[n].dtype).requires_grad_() for n in names}
    outputs = run({**tensors, **leaves})
    grads = torch.autograd.grad(
        list(outputs.values()),
        [leaves[n] for n in names],
        [upstream[n].to(x.dtype) for n, x in outputs.items()],
        materialize_grads=True,
    )
    return {**outputs, **{f"grad {n}": g for n, g in zip(names, grads, strict=True)}}


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
        assert found[name].dtype == dtype
        tolerance.assert_close(name, found[name], value, tolerance.limit("short_convolution", dtype, e, gradient_of))


def torch_convolution(tensors, spec):
    """What torch says of one batch of whole sequences, with the state put before them."""
    x, state = tensors["x"].transpose(1, 2), tensors.get("initial_state")
    before = x.new_zeros(*x.shape[:2], spec.width - 1) if state is None else state
    window = torch.cat([before, x], dim=-1)
    y = F.conv1d(window, tensors["weight"].unsqueeze(1), tensors.get("bias"), groups=x.shape[1])
    y = (F.silu(y) if spec.activation == "silu" else y).transpose(1, 2)
    return {"y": y} | ({"final_state": window[..., x.shape[-1] :]} if spec.states else {})


@pytest.mark.parametrize("length", [1, 2, 5, 40])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_reference_is_torchs_convolution(flags, length):
    spec = Spec(channels=6, dtype="float32", **flags)
    case = Case(name="", dims={"batch": 2, "length": length, "channels": 6}, options={"initial_state": True})
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(length), torch.float32, "cpu")
    upstream = draw_upstream(spec, tensors, 1)
    ours = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    theirs = differentiate(lambda t: torch_convolution(t, spec), tensors, upstream, torch.float64)
    for name, value in theirs.items():
        tolerance.assert_close(name, ours[name], value, 1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_flag(flags, dtype):
    spec = Spec(channels=70, dtype=dtype, **flags)
    seed = zlib.crc32(f"{spec}".encode())
    generator = torch.Generator().manual_seed(seed)
    for i, case in enumerate(cases.cases(spec, random.Random(seed), 8, "interpreted")):
        tensors = cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu")
        check(spec, tensors, draw_upstream(spec, tensors, seed + i), run_op(spec))


def test_fp16():
    spec = Spec(channels=33, dtype="float16", bias=True)
    tensors = {"x": torch.randn(2, 19, 33).half(), "weight": torch.randn(33, 4).half(), "bias": torch.randn(33).half()}
    check(spec, tensors, draw_upstream(spec, tensors, 0), run_op(spec))


def test_packed_sequences_know_nothing_of_each_other():
    """Each packed sequence equals, bit for bit, the same sequence alone."""
    spec = Spec(channels=24, states=True, dtype="float32")
    lengths = [3, 0, 1, 17, 2]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x, weight = torch.randn(1, sum(lengths), 24), torch.randn(24, 4)
    state = torch.randn(len(lengths), 24, 3)
    y, final = op(spec)(x=x, weight=weight, initial_state=state, cu_seqlens=bounds)
    for n, length in enumerate(lengths):
        rows = slice(int(bounds[n]), int(bounds[n]) + length)
        alone, kept = op(spec)(x=x[:, rows], weight=weight, initial_state=state[n : n + 1])
        assert torch.equal(y[:, rows], alone)
        assert torch.equal(final[n : n + 1], kept)


def test_a_sequence_in_two_parts_equals_the_whole():
    spec = Spec(channels=16, states=True, dtype="float32")
    x, weight = torch.randn(2, 30, 16), torch.randn(16, 4)
    whole, _ = op(spec)(x=x, weight=weight)
    for cut in (1, 2, 13, 29):
        head, state = op(spec)(x=x[:, :cut], weight=weight)
        tail, _ = op(spec)(x=x[:, cut:], weight=weight, initial_state=state)
        assert torch.equal(torch.cat([head, tail], dim=1), whole)


def test_transposed_and_expanded_tensors():
    """Channels first in memory, as Mamba's callers hold them, and the gradient of a sum."""
    spec = Spec(channels=20, dtype="float32")
    tensors = {"x": torch.randn(2, 20, 11).transpose(1, 2), "weight": torch.randn(20, 1, 4).squeeze(1)}
    check(spec, tensors, {"y": torch.ones(()).expand(2, 11, 20)}, run_op(spec))


def test_many_tiles_and_programs():
    """Tiles smaller than the filter, several programs sharing the weights' gradient."""
    spec = Spec(channels=40, dtype="float32", bias=True, states=True)
    tensors = {
        "x": torch.randn(2, 37, 40), "weight": torch.randn(40, 4), "bias": torch.randn(40),
        "initial_state": torch.randn(2, 40, 3), "cu_seqlens": None,
    }  # fmt: skip
    config = {
        "forward_strip": 2, "forward_unroll": 1, "forward_warps": 1, "backward_strip": 4, "backward_unroll": 2,
        "backward_warps": 1,
        "block_channels": 16,
    }  # fmt: skip
    upstream = draw_upstream(spec, tensors, 3)
    outputs, saved = template.forward(tensors, spec, config)
    needs = {"x", "weight", "bias", "initial_state"}
    grads = template.backward(tensors, saved, upstream, needs, spec, config)
    exact = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    for name, value in {**outputs, **{f"grad {n}": g for n, g in grads.items()}}.items():
        tolerance.assert_close(name, value, exact[name], tolerance.FLOORS[torch.float32])


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_no_rows(shape):
    spec = Spec(channels=8, states=True, dtype="float32")
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    state = torch.randn(shape[0], 8, 3, requires_grad=True)
    y, final = op(spec)(x=x, weight=weight, initial_state=state)
    (y.sum() + final.sum()).backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(final, state)
    assert torch.equal(weight.grad, torch.zeros(8, 4))
    assert torch.equal(state.grad, torch.ones_like(state))


def test_packed_sequences_in_a_batch_are_refused():
    spec = Spec(channels=8)
    with pytest.raises(ValueError, match="batch of 1"):
        op(spec)(x=torch.randn(2, 4, 8), weight=torch.randn(8, 4), cu_seqlens=torch.tensor([0, 2, 4]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"width": 1}, "2 to 8"), ({"activation": "gelu"}, "activation"), ({"channels": 0}, "positive")],
)
def test_impossible_specs_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Spec(**{"channels": 4, **wrong})
