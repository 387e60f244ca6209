"""The routing template against fp64 and transformers' routers: every flag, ties, groups, forward and backward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.routing import cases
from kernel_templates.routing.op import op
from kernel_templates.routing.reference import activated
from kernel_templates.routing.spec import Spec
from onboarding.stages.judge import oracle

FLAGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, renormalised": {"renormalise": True},
    "sigmoid": {"activation": "sigmoid", "scale": 2.5},
    "sigmoid, all": {"activation": "sigmoid", "bias": True, "renormalise": True, "sum_eps": 1e-20, "scale": 2.446},
    "sqrt_softplus": {"activation": "sqrt_softplus", "bias": True, "renormalise": True},
    "groups by two": {"activation": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "renormalise": True},
    "groups by best": {"groups": 3, "top_groups": 1, "group_score": "max", "scale": 16.0},
}


def run(spec, tensors, upstream):
    given = {n: t.detach().requires_grad_(n == "logits") for n, t in tensors.items()}
    scores, index = op(spec)(**given)
    assert not index.requires_grad
    (gradient,) = torch.autograd.grad(scores, given["logits"], upstream)
    return {"scores": scores, "index": index, "grad logits": gradient}


@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag(flags):
    for dtype in ("bfloat16", "float32"):
        spec = Spec(experts=96, top_k=8, dtype=dtype, **FLAGS[flags])
        generator = torch.Generator().manual_seed(1)
        compared = 0
        for case in cases.cases(spec, random.Random(1), 8, "interpreted"):
            tensors = cases.make_tensors(spec, case, generator, getattr(torch, dtype), "cpu")
            upstream = oracle.draw_upstream(spec, tensors, generator)
            call = oracle.expect(
                oracle.Call(spec=spec, tensors=tensors, upstream=upstream, needs=frozenset({"logits"}))
            )
            if call.well_posed:  # an order that hangs on the last bit of fp32 is nobody's
                compared += 1
                for name, value in run(spec, tensors, upstream["scores"]).items():
                    assert value.dtype == call.expected[name].dtype
                    assert call.expected[name].compare(value).error <= call.expected[name].limit, (case.name, name)
        assert compared >= 4


def test_of_equal_experts_the_lowest_index_wins():
    spec = Spec(experts=12, top_k=5, dtype="float32", activation="sigmoid", bias=True)
    logits = torch.zeros(3, 12)
    logits[1, 7] = logits[1, 9] = 1.0
    logits[2] = -torch.inf
    slots = torch.zeros(5, dtype=torch.int32)
    _, index = op(spec)(logits=logits, bias=torch.zeros(12), slots=slots)
    assert index.tolist() == [[0, 1, 2, 3, 4], [7, 9, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_fewer_experts_than_slots_in_the_best_groups_are_never_repeated():
    """Infinitely bad experts are chosen after all others, each once."""
    spec = Spec(experts=8, top_k=4, dtype="float32", groups=4, top_groups=2, group_score="max")
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 5] = 1.0
    _, index = op(spec)(logits=logits, slots=torch.zeros(4, dtype=torch.int32))
    assert sorted(index[0].tolist()) == [0, 1, 4, 5]


def test_very_negative_and_very_positive_logits():
    for activation in ("sigmoid", "sqrt_softplus", "softmax"):
        spec = Spec(experts=4, top_k=4, dtype="float32", activation=activation)
        logits = torch.tensor([[-60.0, 0.5, 60.0, -30.0]], requires_grad=True)
        scores, index = op(spec)(logits=logits, slots=torch.zeros(4, dtype=torch.int32))
        wide = logits.detach().double().requires_grad_()
        expected = activated(wide, spec)
        assert index.tolist() == [[2, 1, 3, 0]]
        assert torch.allclose(scores.double(), expected.gather(-1, index), rtol=1e-5, atol=1e-38)
        upstream = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
        (found,) = torch.autograd.grad(scores, logits, upstream)
        (wanted,) = torch.autograd.grad(expected.gather(-1, index), wide, upstream.double())
        assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-12), activation


@pytest.mark.parametrize(
    ("place", "cls", "config", "flags"),
    [
        ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": 16, "norm_topk_prob": True}, {"renormalise": True}),
        ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": 16}, {"renormalise": True}),
        ("deepseek_v3", "DeepseekV3TopkRouter", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2,
                                                  "norm_topk_prob": True, "routed_scaling_factor": 2.5},
         {"activation": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "renormalise": True, "scale": 2.5,
          "sum_eps": 1e-20}),
    ],
)  # fmt: skip
def test_routers_of_transformers_are_the_same_function(place, cls, config, flags):
    import transformers

    module = pytest.importorskip(f"transformers.models.{place}.modeling_{place}")
    router = getattr(module, cls)(
        transformers.AutoConfig.for_model(place, hidden_size=8, num_experts_per_tok=3, **config)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, 8, generator=generator))
        if hasattr(router, "bias"):
            router.bias.zero_()
        if flags.get("bias"):
            router.e_score_correction_bias.copy_(0.3 * torch.randn(16, generator=generator))
    logits, weights, index = router(torch.randn(40, 8, generator=generator))
    spec = Spec(experts=16, top_k=3, dtype="float32", **flags)
    given = logits.detach().requires_grad_()
    bias = {"bias": router.e_score_correction_bias} if flags.get("bias") else {}
    scores, chosen = op(spec)(logits=given, slots=torch.zeros(3, dtype=torch.int32), **bias)
    # its order inside a row is not defined
    order, own = index.argsort(-1), chosen.argsort(-1)
    assert torch.equal(index.gather(-1, order), chosen.gather(-1, own))
    tolerance.assert_close("weights", scores.gather(-1, own), weights.gather(-1, order).double(), 1e-6)
    upstream = torch.randn(40, 3, generator=generator)
    (wanted,) = torch.autograd.grad(weights.gather(-1, order), logits, upstream)
    (found,) = torch.autograd.grad(scores.gather(-1, own), given, upstream)
    tolerance.assert_close("gradient", found, wanted.double(), 1e-5)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 97}, {"groups": 5}, {"groups": 4, "top_groups": 5}, {"groups": 48}, {"activation": "tanh"}]
)
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must|one of"):
        Spec(**({"experts": 96, "top_k": 8} | wrong))
