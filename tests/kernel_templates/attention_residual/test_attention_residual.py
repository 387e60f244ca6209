"""The attention residual template against fp64 and torch: every output and gradient, many sources, odd sizes."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.attention_residual import cases, template
from kernel_templates.attention_residual.op import op
from kernel_templates.attention_residual.spec import Spec
from onboarding.stages.judge import oracle

FLAGS = {"nine": {}, "two, scaled": {"sources": 2, "scale": 0.25}, "seventeen": {"sources": 17, "eps": 1e-3}}


def run(spec, tensors, upstream, needs=None):
    given = {n: t.detach().requires_grad_(needs is None or n in needs) for n, t in tensors.items()}
    (h,) = op(spec)(**given)
    wanted = [n for n, t in given.items() if t.requires_grad]
    return h, dict(zip(wanted, torch.autograd.grad(h, [given[n] for n in wanted], upstream), strict=True))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_flag(flags, dtype):
    spec = Spec(hidden=300, dtype=dtype, **FLAGS[flags])
    generator = torch.Generator().manual_seed(1)
    compared = 0
    for case in cases.cases(spec, random.Random(1), 9, "interpreted"):
        tensors = cases.make_tensors(spec, case, generator, getattr(torch, dtype), "cpu")
        upstream = oracle.draw_upstream(spec, tensors, generator)
        call = oracle.expect(
            oracle.Call(spec=spec, tensors=tensors, upstream=upstream, needs=oracle.differentiable(spec, tensors))
        )
        if not call.well_posed:
            continue
        compared += 1
        h, gradients = run(spec, tensors, upstream["h"])
        found = {"h": h} | {f"grad {n}": g for n, g in gradients.items()}
        assert set(found) == set(call.expected)
        for name, value in found.items():
            assert value.dtype == call.expected[name].dtype
            assert call.expected[name].compare(value).error <= call.expected[name].limit, (case.name, name)
    assert compared >= 5


def test_it_is_attention_over_depth_as_torch_has_it():
    """One token a batch entry: queries of length one over L keys (normalised) and values."""
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randn(3, 5, 64, generator=generator) for _ in range(4)]
    query = torch.randn(64, generator=generator)
    v = torch.stack(sources, -2).double()
    keys = torch.nn.functional.rms_norm(v, (64,), eps=1e-6)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double().expand(3, 5, 1, 64), keys, v, scale=0.125
    ).squeeze(-2)
    (h,) = op(Spec(hidden=64, sources=4, scale=0.125, dtype="float32"))(
        query=query, **{f"v{i}": s for i, s in enumerate(sources)}
    )
    tolerance.assert_close("h", h, expected, 1e-5)


def test_equal_sources_are_passed_on_and_scores_shift_freely():
    """The average of equal things is that thing; its score's gradients cancel out, the rest is the shares of dh."""
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(7, 40, generator=generator)
    spec = Spec(hidden=40, sources=3, dtype="float32")
    upstream = torch.randn(7, 40, generator=generator)
    tensors = {"query": torch.randn(40, generator=generator), "v0": v, "v1": v.clone(), "v2": v.clone()}
    h, gradients = run(spec, tensors, upstream)
    tolerance.assert_close("h", h, v.double(), 1e-6)
    for name in ("v0", "v1", "v2"):
        tolerance.assert_close(name, gradients[name], upstream.double() / 3.0, 1e-5)
    assert gradients["query"].abs().max() < 1e-4


def test_scores_far_apart_neither_overflow_nor_vanish():
    sources = {f"v{i}": torch.full((2, 16), value) for i, value in enumerate((-1.0, 1.0, 2.0))}
    spec = Spec(hidden=16, sources=3, scale=100.0, eps=1e-12, dtype="float32")
    (h,) = op(spec)(query=torch.ones(16), **sources)
    # keys are -1, 1 and 1: the first is e^3200 times smaller than the others
    tolerance.assert_close("h", h, torch.full((2, 16), 1.5, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize("needs", [{"query"}, {"v1"}, {"v0", "v3", "query"}, {"v2", "v4"}])
def test_only_what_is_asked_for_is_computed_and_it_is_the_same(needs):
    spec = Spec(hidden=33, sources=5)
    case = cases.cases(spec, random.Random(1), 1, "interpreted")[0]
    tensors = cases.make_tensors(spec, case, torch.Generator().manual_seed(4), torch.bfloat16, "cpu")
    upstream = torch.randn(tensors["v0"].shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    _, every = run(spec, tensors, upstream)
    before = {n: t.clone() for n, t in tensors.items()}
    _, some = run(spec, tensors, upstream, needs)
    assert set(some) == needs
    assert all(torch.equal(some[n], every[n]) for n in needs)
    assert all(torch.equal(t, before[n]) for n, t in tensors.items())


def test_what_lies_behind_the_rows_is_not_read():
    spec = Spec(hidden=24, sources=3, dtype="float32")
    generator = torch.Generator().manual_seed(6)

    def poisoned(rows):
        space = torch.full((rows * 24 + 4096,), torch.nan)
        space[: rows * 24] = torch.randn(rows * 24, generator=generator)
        return space[: rows * 24].view(rows, 24)

    tensors = {"query": poisoned(1).view(24)} | {f"v{i}": poisoned(67) for i in range(3)}
    h, gradients = run(spec, tensors, poisoned(67))
    assert bool(h.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in gradients.values())


def test_sources_of_other_shapes_are_refused():
    spec = Spec(hidden=8, sources=2)
    with pytest.raises(ValueError, match="shape of v0"):
        op(spec)(query=torch.zeros(8), v0=torch.zeros(3, 8), v1=torch.zeros(4, 8))
    assert template.bucket({"v0": torch.zeros(3, 8)}, spec) == {"hidden": 8}


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"sources": 1}, {"sources": 129}, {"scale": 0.0}])
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Spec(**({"hidden": 8} | wrong))


def test_bytes_are_those_of_one_reading_each_way():
    spec = Spec(hidden=7168, sources=9)
    # 10 passes forward and 19 backward over 8192 x 7168 in bf16, at 4.27 TB/s: .80 ms
    moved = spec.bytes_moved(8192) + spec.bytes_moved(8192, backward=True)
    assert moved / 4.27e9 == pytest.approx(0.797, abs=0.002)
