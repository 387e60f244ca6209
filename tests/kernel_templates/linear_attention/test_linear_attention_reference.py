"""The reference against the implementations that transformers ships, and the rounded reference against it."""

from __future__ import annotations

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.case import Case
from kernel_templates.linear_attention import cases, reference, template
from kernel_templates.linear_attention.spec import Spec


def inputs(spec, length, kind="real", key_heads=2, group=1, state=True, dims=(24, 16), batch=2, lengths=None):
    sizes = {"batch": batch, "length": length, "key_heads": key_heads, "value_heads": key_heads * group}
    case = Case(
        name="",
        dims={**sizes, "key_dim": dims[0], "value_dim": dims[1]},
        distribution=kind,
        options={"initial_state": state, "lengths": lengths},
    )
    return cases.make_tensors(spec, case, torch.Generator().manual_seed(length), torch.float64, "cpu")


@pytest.mark.parametrize("source", ["kimi_linear", "glm5_next"])
def test_kda_is_that_of_transformers(source):
    modeling = pytest.importorskip(f"transformers.models.{source}.modeling_{source}")
    spec = Spec(key_heads=2, value_heads=2, key_dim=24, value_dim=16)
    t = inputs(spec, 70)
    expected = reference.reference(t, spec)
    for function in (modeling.chunk_kimi_delta_attention, modeling.recurrent_kimi_delta_attention):
        o, state = function(
            *(t[n].float() for n in ("q", "k", "v")),
            g=t["g"].float(),
            beta=t["beta"].float(),
            initial_state=t["initial_state"].float(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        tolerance.assert_close("o", o, expected["o"], 1e-5)
        tolerance.assert_close("final_state", state, expected["final_state"], 1e-5)


@pytest.mark.parametrize("group", [1, 2])
def test_gated_delta_rule_is_that_of_transformers(group):
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    spec = Spec(key_heads=2, value_heads=2 * group, key_dim=24, value_dim=16, decay="head")
    t = inputs(spec, 70, group=group)
    expected = reference.reference(t, spec)
    o, state = modeling.torch_chunk_gated_delta_rule(
        *(t[n].float() for n in ("q", "k", "v")),
        g=t["g"].float(),
        beta=t["beta"].float(),
        initial_state=t["initial_state"].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    tolerance.assert_close("o", o, expected["o"], 1e-5)
    tolerance.assert_close("final_state", state, expected["final_state"], 1e-5)


def test_without_decay_and_delta_it_is_causal_linear_attention():
    spec = Spec(
        key_heads=2, value_heads=2, key_dim=24, value_dim=16, decay="none", delta=False, qk_l2norm=False, scale=0.5
    )
    t = inputs(spec, 33, state=False)
    scores = torch.einsum("bihk,bjhk->bhij", t["q"], t["k"]).tril() * 0.5
    o = reference.reference(t, spec)["o"]
    tolerance.assert_close("o", o, torch.einsum("bhij,bjhv->bihv", scores, t["v"]), 1e-12)


def test_packed_sequences_do_not_see_each_other():
    spec = Spec(key_heads=2, value_heads=4, key_dim=24, value_dim=16)
    lengths = [5, 0, 1, 19]
    t = inputs(spec, 25, group=2, batch=1, lengths=lengths)
    packed = reference.reference(t, spec)
    start = 0
    for n, length in enumerate(lengths):
        own = {name: t[name][:, start : start + length] for name in ("q", "k", "v", "g", "beta")}
        alone = reference.reference({**own, "initial_state": t["initial_state"][n : n + 1]}, spec)
        tolerance.assert_close("o", packed["o"][:, start : start + length], alone["o"], 1e-12)
        tolerance.assert_close("final_state", packed["final_state"][n], alone["final_state"][0], 1e-12)
        start += length


@pytest.mark.parametrize("kind", ["real", "bounded", "strong", "slow", "correlated"])
@pytest.mark.parametrize("decay", ["channel", "head", "none"])
def test_chunked_form_is_the_recurrence(decay, kind):
    spec = Spec(key_heads=1, value_heads=2, key_dim=24, value_dim=16, decay=decay, dtype="float32")
    t = inputs(spec, 83, kind, key_heads=1, group=2)
    leaves = {n: x.requires_grad_() for n, x in t.items() if x is not None}
    expected = reference.reference(leaves, spec)
    found = reference.rounded_reference(leaves, spec, torch.float32, {"chunk": 32})
    upstream = [torch.randn_like(x) for x in expected.values()]
    for name in expected:
        tolerance.assert_close(name, found[name], expected[name], 2e-6)
    exact = torch.autograd.grad(list(expected.values()), list(leaves.values()), upstream)
    own = torch.autograd.grad(list(found.values()), list(leaves.values()), [x.float() for x in upstream])
    for name, a, b in zip(leaves, own, exact, strict=True):
        tolerance.assert_close(f"grad {name}", a, b, 2e-5)


def test_rounded_reference_has_the_constants_of_the_template():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert reference.leaf_rows(dtype) == template.leaf_rows(dtype)
        assert reference._smallest_beta(dtype) == template.smallest_beta(dtype)


def test_no_tokens_still_have_gradients():
    spec = Spec(key_heads=2, value_heads=2, key_dim=24, value_dim=16)
    t = {n: x.requires_grad_() for n, x in inputs(spec, 0).items() if x is not None}
    found = reference.reference(t, spec)
    grads = torch.autograd.grad([found["o"].sum() + found["final_state"].sum()], list(t.values()))
    assert dict(zip(t, grads, strict=True))["initial_state"].eq(1.0).all()
