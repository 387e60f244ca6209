"""The rotary template against fp64 and transformers' own functions: every convention, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.rotary import cases, reference
from kernel_templates.rotary.op import op
from kernel_templates.rotary.spec import Spec
from onboarding.stages.judge import oracle

SIZES = {"heads": 4, "key_heads": 2, "head_dim": 64, "rotary_dim": 64}
FLAGS = {
    "half": {},
    "queries only": {"keys": False},
    "interleaved": {"pairs": "interleaved"},
    "interleaved, angles by pair": {"pairs": "interleaved", "angles": "pair"},
    "DeepSeek": {"pairs": "interleaved", "angles": "pair", "regrouped": True},
    "half, angles by pair": {"angles": "pair"},
    "half a table": {"angles": "half"},
    "half a table, interleaved": {"angles": "half", "pairs": "interleaved"},
    "multimodal": {"temporal": 5, "height": 9},
    "norm": {"norm": True, "eps": 1e-5},
    "norm, 1 + w, interleaved": {"norm": True, "offset": True, "pairs": "interleaved"},
    "norm, queries only": {"norm": True, "keys": False, "regrouped": True, "pairs": "interleaved"},
}


def leaves(tensors, spec):
    wanted = {role.name for role in spec.inputs() if role.differentiable}
    return {n: None if t is None else t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}


def run(spec, tensors, upstream):
    given = leaves(tensors, spec)
    outputs = dict(zip((r.name for r in spec.outputs()), op(spec)(**given), strict=True))
    wanted = {n: t for n, t in given.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad([outputs[n] for n in upstream], list(wanted.values()), list(upstream.values()))
    return outputs | {f"grad {n}": g for n, g in zip(wanted, found, strict=True)}


@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag(flags):
    for dtype in ("bfloat16", "float32"):
        spec = Spec(**SIZES, dtype=dtype, **FLAGS[flags])
        generator = torch.Generator().manual_seed(1)
        for case in cases.cases(spec, random.Random(1), 6, "interpreted"):
            kind = getattr(torch, dtype)
            tensors = cases.make_tensors(spec, case, generator, kind, "cpu")
            upstream = oracle.draw_upstream(spec, tensors, generator)
            needs = oracle.differentiable(spec, tensors)
            call = oracle.expect(oracle.Call(spec=spec, tensors=tensors, upstream=upstream, needs=needs))
            for name, value in run(spec, tensors, upstream).items():
                expected = call.expected[name]
                assert value.dtype == expected.dtype
                assert expected.compare(value).error <= expected.limit, (case.name, name)


def heads(generator, tokens=7):
    q = torch.randn(2, tokens, 4, 32, generator=generator)
    k = torch.randn(2, tokens, 2, 32, generator=generator)
    return q, k


def tables(size, generator, tokens=7, axes=()):
    """cos and sin as transformers makes them: the same angles in both halves."""
    angle = torch.randn(*axes, 2, tokens, size // 2, generator=generator).repeat_interleave(1, -1)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("place", "function", "size", "flags"),
    [
        ("llama", "apply_rotary_pos_emb", 32, {}),
        ("glm4_moe", "apply_rotary_pos_emb", 16, {}),
        ("glm", "apply_rotary_pos_emb", 16, {"pairs": "interleaved", "angles": "pair"}),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", 32,
         {"pairs": "interleaved", "angles": "pair", "regrouped": True}),
        ("gpt_oss", "apply_rotary_pos_emb", 32, {"angles": "half"}),
        ("cohere", "apply_rotary_pos_emb", 32, {"pairs": "interleaved"}),
    ],
)  # fmt: skip
def test_transformers_computes_the_same(place, function, size, flags):
    module = pytest.importorskip(f"transformers.models.{place}.modeling_{place}")
    generator = torch.Generator().manual_seed(3)
    (q, k), (cos, sin) = heads(generator), tables(size, generator)
    if flags.get("angles") == "half":
        cos, sin = cos[..., : size // 2].contiguous(), sin[..., : size // 2].contiguous()
    spec = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=size, dtype="float32", **flags)
    peer = [t.clone().requires_grad_() for t in (q, k)]
    expected = getattr(module, function)(peer[0].transpose(1, 2), peer[1].transpose(1, 2), cos, sin)
    expected = [t.transpose(1, 2) for t in expected]
    own = [t.clone().requires_grad_() for t in (q, k)]
    found = op(spec)(q=own[0], k=own[1], cos=cos, sin=sin)
    upstream = [torch.randn(t.shape, generator=generator) for t in expected]
    grads = torch.autograd.grad(found, own, upstream)
    for value, wanted in zip(
        (*found, *grads), (*expected, *torch.autograd.grad(expected, peer, upstream)), strict=True
    ):
        tolerance.assert_close(place, value, wanted.double(), 1e-6)


def test_multimodal_sections():
    """Qwen2-VL's rule: sections of both halves of the channels take time, height, width, time, height, width."""
    generator = torch.Generator().manual_seed(4)
    (q, k), (cos, sin) = heads(generator), tables(32, generator, axes=(3,))
    spec = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=32, dtype="float32", temporal=4, height=6)
    plain = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=32, dtype="float32")
    axis = torch.tensor(([0] * 4 + [1] * 6 + [2] * 6) * 2)
    chosen = [table.gather(0, axis.expand(1, 2, 7, 32))[0] for table in (cos, sin)]
    expected = reference.reference({"q": q, "k": k, "cos": chosen[0], "sin": chosen[1]}, plain)
    for value, wanted in zip(op(spec)(q=q, k=k, cos=cos, sin=sin), expected.values(), strict=True):
        tolerance.assert_close("multimodal", value, wanted.double(), 1e-6)


def test_a_turn_and_its_reverse_are_nothing():
    """Rotations keep lengths: the turn by -angle undoes the turn, and backward is the turn by -angle."""
    spec = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=32, dtype="float32")
    generator = torch.Generator().manual_seed(5)
    (q, k), (cos, sin) = heads(generator), tables(32, generator)
    there = op(spec)(q=q, k=k, cos=cos, sin=sin)
    back = op(spec)(q=there[0], k=there[1], cos=cos, sin=-sin)
    assert torch.allclose(back[0], q, atol=1e-5)
    assert torch.allclose(there[1].norm(dim=-1), k.norm(dim=-1), atol=1e-5)
    given = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(op(spec)(q=given, k=k, cos=cos, sin=sin)[0], given, there[0])
    assert torch.allclose(gradient, q, atol=1e-5)


def test_norm_then_turn_equals_both_in_a_row():
    spec = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=16, norm=True, dtype="float32")
    generator = torch.Generator().manual_seed(6)
    (q, k), (cos, sin) = heads(generator), tables(16, generator)
    weights = torch.rand(2, 32, generator=generator)
    found = op(spec)(q=q, k=k, cos=cos, sin=sin, q_weight=weights[0], k_weight=weights[1])
    plain = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=16, dtype="float32")
    normed = [torch.nn.functional.rms_norm(x, (32,), w, spec.eps) for x, w in zip((q, k), weights, strict=True)]
    expected = reference.reference({"q": normed[0], "k": normed[1], "cos": cos, "sin": sin}, plain)
    for value, wanted in zip(found, expected.values(), strict=True):
        tolerance.assert_close("norm", value, wanted.double(), 1e-6)


def test_a_missing_gradient_is_zero():
    spec = Spec(heads=4, key_heads=2, head_dim=32, rotary_dim=32, dtype="float32")
    generator = torch.Generator().manual_seed(7)
    (q, k), (cos, sin) = heads(generator), tables(32, generator)
    q.requires_grad_()
    k.requires_grad_()
    op(spec)(q=q, k=k, cos=cos, sin=sin)[0].sum().backward()
    assert q.grad.abs().sum() > 0
    assert torch.equal(k.grad, torch.zeros_like(k))


@pytest.mark.parametrize(
    "wrong", [{"rotary_dim": 3}, {"rotary_dim": 96}, {"regrouped": True}, {"offset": True}, {"pairs": "thirds"}]
)
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|only|needs|one of"):
        Spec(**(SIZES | wrong))
