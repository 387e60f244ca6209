"""The indexer template against fp64, torch and transformers: every output and gradient, ties, borders, long rows."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_templates import tolerance
from kernel_templates.bind import bind, bind_template
from kernel_templates.indexer import cases, reference, template
from kernel_templates.indexer.op import CONFIGS, op
from kernel_templates.indexer.spec import Spec
from onboarding.stages.judge import oracle

CONFIG = json.loads((CONFIGS / "interpreter.json").read_text())["rows"][0]["config"]
FLAGS: dict[str, dict[str, Any]] = {
    "relu, weighted": {},
    "relu, plain sum": {"weighted": False},
    "weighted sum": {"activation": "none"},
    "plain sum": {"activation": "none", "weighted": False},
    "objective": {"operation": "objective"},
    "compression": {"operation": "compression"},
}


def operator(spec: Spec, **changes: Any):
    """The template with the interpreter's configuration, changed."""
    config = CONFIG | changes
    name = f"indexer_{zlib.crc32(repr((spec, sorted(changes.items()))).encode())}"
    return bind(bind_template(template, spec), name=name, choose_config=lambda bucket, device: config)


def slots(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def drawn(queries, keys, heads, dim, seed=0, batch=1, dtype=torch.bfloat16, whole=False):
    """q, k, weights; small integers on request, of whose scores many are equal and all exact."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        x = torch.randn(size, generator=generator)
        return (x.round().clamp(-2, 2) if whole else x).to(dtype)

    return {
        "q": normal(batch, queries, heads, dim),
        "k": normal(batch, keys, dim),
        "weights": normal(batch, queries, heads),
    }


def causal(queries, keys, batch=1):
    """begin and end of queries that are the last of the keys."""
    end = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32).expand(batch, queries).contiguous()
    return {"begin": torch.zeros_like(end), "end": end}


def gradients(run, spec, tensors, upstream):
    wanted = [role.name for role in spec.inputs() if role.differentiable and role.name in tensors]
    given = {n: t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}
    outputs = run(**given)
    return outputs, dict(
        zip(wanted, torch.autograd.grad(outputs[0], [given[n] for n in wanted], upstream), strict=True)
    )


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [(flags, dtype) for flags in FLAGS for dtype in ("bfloat16", "float32")] + [("relu, weighted", "float16")],
)
def test_every_flag(flags, dtype):
    spec = Spec(top_k=64, dtype=dtype, **FLAGS[flags])
    generator = torch.Generator().manual_seed(1)
    compared = 0
    for case in cases.cases(spec, random.Random(1), 9, "interpreted"):
        tensors = cases.make_tensors(spec, case, generator, getattr(torch, dtype), "cpu")
        upstream = oracle.draw_upstream(spec, tensors, generator)
        needs = oracle.differentiable(spec, tensors)
        call = oracle.expect(oracle.Call(spec=spec, tensors=tensors, upstream=upstream, needs=needs))
        if not call.well_posed:  # equal scores of fp32 inputs do not stay equal when the judge nudges them
            continue
        compared += 1
        first = spec.outputs()[0].name
        outputs, grads = gradients(op(spec), spec, tensors, upstream[first])
        found = dict(zip((r.name for r in spec.outputs()), outputs, strict=True))
        found |= {f"grad {n}": g for n, g in grads.items()}
        assert set(found) == set(call.expected)
        for name, value in found.items():
            expected = call.expected[name]
            assert value.dtype == expected.dtype
            assert expected.compare(value).error <= expected.limit, (case.name, name)
            if not value.is_floating_point():
                assert torch.equal(value.double(), expected.value), (case.name, name)
    assert compared >= 4


@pytest.mark.parametrize("whole", [True, False])
def test_every_path_makes_the_same_choice(whole):
    """Rows that fit, rows narrowed by a sample, rows whose sample misleads, many chunks and one."""
    tensors = drawn(9, 300, 3, 16, whole=whole) | causal(9, 300) | {"slots": slots(40)}
    if whole:
        tensors["k"][:, 100:200] = 0.0
    spec = Spec(top_k=40)
    exact = reference.reference({n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}, spec)
    configs = (
        {"candidates": 512},
        {"candidates": 128, "sample": 32},
        {"candidates": 64, "sample": 64},
        {"candidates": 32},
        {"workspace_kib": 1024, "score_columns": 16, "score_keys": 32, "scan_block": 128},
        {"workspace_kib": 1, "score_split": 64},
    )
    runs = [operator(spec, **config)(**tensors) for config in configs]
    for scores, index, count in runs:
        assert torch.equal(index.double(), exact["index"])
        assert torch.equal(count.double(), exact["count"])
        tolerance.assert_close("scores", scores, exact["scores"], 1e-6)
    # the same tiles of products, the same bits
    assert all(torch.equal(scores, runs[0][0]) for scores, _, _ in runs[:4])


def test_of_equal_scores_the_lowest_index_wins_and_zeros_have_no_sign():
    """Negative weights make relu's zeros -0.0; in bit order these would lie below +0.0."""
    k = torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [0.0], [2.0], [-2.0], [0.0]]).expand(8, 16).contiguous()
    tensors = {
        "q": torch.ones(1, 2, 1, 16), "k": k.unsqueeze(0), "weights": torch.tensor([[[-1.0], [1.0]]]),
        "begin": torch.zeros(1, 2, dtype=torch.int32), "end": torch.full((1, 2), 8, dtype=torch.int32),
        "slots": slots(4),
    }  # fmt: skip
    for dtype, candidates in ((torch.float32, 64), (torch.bfloat16, 64), (torch.float32, 4)):
        spec = Spec(top_k=4, dtype=str(dtype).removeprefix("torch."))
        given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        scores, index, count = operator(spec, candidates=candidates, sample=4)(**given)
        # the first query likes zeros, of which there are five; the second large products, then the first zero
        assert index.tolist() == [[[1, 3, 4, 6], [0, 1, 2, 5]]]
        assert scores.tolist() == [[[0.0] * 4, [4.0, 0.0, 4.0, 8.0]]]
        assert count.tolist() == [[4, 4]]


def test_infinite_and_undefined_scores():
    """Minus infinity is chosen after all others; so is NaN, and it is not hidden."""
    k = torch.zeros(1, 6, 16)
    k[0, :, 0] = torch.tensor([torch.inf, -torch.inf, 1.0, torch.nan, -1.0, 2.0])
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 4.0
    q[..., 1:] = 0.0
    k[0, :, 1:] = 0.0
    spec = Spec(top_k=4, dtype="float32", activation="none", weighted=False)
    visible = {"begin": torch.zeros(1, 1, dtype=torch.int32), "end": torch.full((1, 1), 6, dtype=torch.int32)}
    scores, index, _ = op(spec)(q=q, k=k, slots=slots(4), **visible)
    assert index.tolist() == [[[0, 2, 4, 5]]]
    scores, index, _ = op(spec)(q=q, k=k, slots=slots(5), **visible)
    assert index.tolist() == [[[0, 1, 2, 4, 5]]]
    scores, index, _ = op(Spec(top_k=6, dtype="float32", weighted=False))(q=q, k=k, slots=slots(6), **visible)
    assert scores[0, 0].isnan().tolist() == [False, False, False, True, False, False]


def test_rows_with_fewer_visible_keys_than_slots():
    tensors = drawn(4, 10, 2, 16) | {"slots": slots(6)}
    tensors["begin"] = torch.tensor([[0, 7, 4, -3]], dtype=torch.int32)
    tensors["end"] = torch.tensor([[3, 99, 4, 1]], dtype=torch.int32)
    scores, index, count = op(Spec(top_k=6))(**tensors)
    assert index.tolist() == [[[0, 1, 2, -1, -1, -1], [7, 8, 9, -1, -1, -1], [-1] * 6, [0, -1, -1, -1, -1, -1]]]
    assert count.tolist() == [[3, 3, 0, 1]]
    assert scores[index < 0].tolist() == [0.0] * 17
    more = op(Spec(top_k=6))(**(tensors | {"slots": slots(30)}))[1]
    assert torch.equal(more[..., :6], index)
    assert bool((more[..., 6:] == -1).all())


def test_packed_documents_are_those_documents_alone():
    """Bitwise, with gradients: a border is a border for keys, choice and sums alike."""
    spec = Spec(top_k=9)
    lengths = [1, 40, 0, 17, 23]
    total = sum(lengths)
    # whole numbers: sums are exact in any order
    packed = drawn(total, total, 3, 16, whole=True) | {"slots": slots(9)}
    begin = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)]).to(torch.int32)
    packed |= {"begin": begin.unsqueeze(0), "end": torch.arange(1, total + 1, dtype=torch.int32).unsqueeze(0)}
    upstream = torch.randn(1, total, 9, generator=torch.Generator().manual_seed(2)).round()
    (scores, index, count), grads = gradients(op(spec), spec, packed, upstream)
    for i, n in enumerate(lengths):
        rows = slice(sum(lengths[:i]), sum(lengths[:i]) + n)
        alone = {name: packed[name][:, rows].contiguous() for name in ("q", "k", "weights")} | causal(n, n)
        (s, x, c), g = gradients(op(spec), spec, alone | {"slots": slots(9)}, upstream[:, rows])
        assert torch.equal(scores[:, rows], s)
        assert torch.equal(index[:, rows], torch.where(x >= 0, x + rows.start, -1))
        assert torch.equal(count[:, rows], c)
        for name, gradient in g.items():
            assert torch.equal(grads[name][:, rows], gradient), name


def test_what_a_query_does_not_see_changes_nothing():
    """NaN in keys that nobody sees, and behind the end of every tensor."""
    tensors = drawn(12, 60, 3, 16, batch=2) | causal(12, 60, 2) | {"slots": slots(7)}
    tensors["begin"] += 5
    tensors["end"] -= 3
    spec = Spec(top_k=7)
    upstream = torch.randn(2, 12, 7, generator=torch.Generator().manual_seed(2))
    clean = gradients(op(spec), spec, tensors, upstream)

    def poisoned(t):
        if not t.is_floating_point():
            return t
        space = torch.full((t.numel() + 4096,), torch.nan, dtype=t.dtype)
        space[: t.numel()] = t.flatten()
        return space[: t.numel()].view_as(t)

    dirty = {n: poisoned(t) for n, t in tensors.items()}
    dirty["k"][:, :5] = torch.nan
    dirty["k"][:, -3:] = torch.nan
    outputs, grads = gradients(op(spec), spec, dirty, upstream)
    assert all(torch.equal(a, b) for a, b in zip(clean[0], outputs, strict=True))
    assert all(torch.equal(clean[1][n], g) for n, g in grads.items())
    # gradients that flow into empty slots are nobody's
    tensors["begin"][:, ::2] = 56
    clean = gradients(op(spec), spec, tensors, upstream)
    upstream[:, ::2, 2:] = torch.nan
    again = gradients(op(spec), spec, tensors, upstream)
    assert all(torch.equal(clean[1][n], g) for n, g in again[1].items())


def test_chunks_of_the_backward_and_two_runs_agree():
    spec = Spec(top_k=20)
    tensors = drawn(150, 150, 4, 32) | causal(150, 150) | {"slots": slots(20)}
    upstream = torch.randn(1, 150, 20, generator=torch.Generator().manual_seed(2))
    runs = [gradients(operator(spec, partial_kib=kib), spec, tensors, upstream) for kib in (1, 1, 8192)]
    for name, gradient in runs[0][1].items():
        assert torch.equal(gradient, runs[1][1][name])
        # one chunk adds in another order than three
        tolerance.assert_close(name, runs[2][1][name], gradient.double(), 2.5e-3)


class Largest(TorchDispatchMode):
    """The largest tensor that the host functions made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "new_" in str(func):
            self.numel = max(self.numel, result.numel())
        return result


def test_there_is_never_a_score_of_every_pair():
    tensors = drawn(250, 250, 2, 16) | causal(250, 250) | {"slots": slots(4)}
    spec = Spec(top_k=4)
    bound, config = bind_template(template, spec), CONFIG | {"partial_kib": 4}
    with Largest() as largest:
        outputs, saved = bound.forward(tensors, config)
        bound.backward(tensors, saved, {"scores": outputs["scores"]}, frozenset({"q", "k", "weights"}), config)
    # the workspace of one block of queries; gradients and their parts
    assert largest.numel <= max(CONFIG["workspace_kib"] * 256, tensors["q"].numel())
    assert largest.numel < 250 * 250 / 4


def _divergence(tensors, index, target):
    """The training objective from its definition, in fp64: KL over the listed keys, mean over queries."""
    z = torch.relu(torch.einsum("shd,td->sht", tensors["q"][0], tensors["k"][0])) * tensors["q"].shape[-1] ** -0.5
    scores = torch.einsum("sht,sh->st", z, tensors["weights"][0])
    total = torch.zeros((), dtype=torch.float64)
    for row, chosen in enumerate(index):
        kept = chosen[chosen >= 0].long()
        p = target[row, kept] / target[row, kept].sum()
        total = total + torch.nn.functional.kl_div(scores[row, kept].log_softmax(-1), p, reduction="sum")
    return total / len(index)


@pytest.mark.parametrize("wide", [False, True], ids=["sparse stage", "dense warm-up"])
def test_training_moves_the_indexer_as_the_objective_says(wide):
    """Selection and objective chained, against autograd through the definition; all keys chosen is the warm-up."""
    queries, count = 40, 40 if wide else 8
    tensors = drawn(queries, queries, 3, 16, dtype=torch.float32)
    target = 5.0 * torch.rand(queries, queries, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    scores, index, used = op(Spec(top_k=count, dtype="float32"))(
        **given, **causal(queries, queries), slots=slots(count)
    )
    listed = target.gather(-1, index[0].clamp_min(0).long()).float().unsqueeze(0)
    (loss,) = op(Spec(operation="objective", top_k=count))(scores=scores, target=listed, count=used)
    loss.mean().backward()
    exact = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    expected = _divergence(exact, index[0], target)
    expected.backward()
    tolerance.assert_close("loss", loss.mean(), expected.detach(), 1e-5)
    for name, tensor in given.items():
        tolerance.assert_close(name, tensor.grad, exact[name].grad, 1e-5)
        assert float(tensor.grad.norm()) > 0


def test_objective_of_equal_distributions_is_zero_and_rows_without_target_are_left_out():
    spec = Spec(operation="objective", top_k=5, dtype="float32")
    scores = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(4)).requires_grad_()
    target = 3.0 * scores.detach().softmax(-1)
    target[0, 1] = 0.0
    count = torch.tensor([[5, 5, 0, 5]], dtype=torch.int32)
    (loss,) = op(spec)(scores=scores, target=target, count=count)
    assert loss.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.abs().max() < 1e-6
    assert gradient[0, 1:3].abs().max() == 0.0


def test_transformers_glm5_next_pools_alike():
    """Pools begin at the first key that is no padding; the last one is not complete."""
    module = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    indexer = module.Glm5NextTextIndexer.__new__(module.Glm5NextTextIndexer)
    torch.nn.Module.__init__(indexer)
    indexer.head_dim, indexer.index_kpool = 16, 4
    generator = torch.Generator().manual_seed(7)
    indexer.index_kpool_compress_ape = torch.nn.Parameter(torch.randn(4, 16, generator=generator))
    k, gate = (torch.randn(2, 23, 16, generator=generator) for _ in range(2))
    valid = torch.ones(2, 23, 1)
    valid[1, :3] = 0.0
    pooled, places, complete = indexer.get_pooled_states(torch.cat([k, gate, valid], -1))
    start = torch.where(complete, places[..., 0], -1).int()
    (found,) = op(Spec(operation="compression", top_k=1, dtype="float32"))(
        k=k, gate=gate, bias=indexer.index_kpool_compress_ape.detach(), start=start
    )
    assert start.tolist() == [[0, 4, 8, 12, 16], [3, 7, 11, 15, 19]]
    tolerance.assert_close("pooled", found, pooled.detach().double(), 1e-6)


def test_tokens_of_no_pool_have_no_gradient():
    spec = Spec(operation="compression", top_k=1)
    generator = torch.Generator().manual_seed(8)
    tensors = {n: torch.randn(1, 12, 16, generator=generator).bfloat16() for n in ("k", "gate")}
    tensors |= {"bias": torch.randn(3, 16, generator=generator).bfloat16()}
    tensors["start"] = torch.tensor([[1, -1, 5, 10]], dtype=torch.int32)
    upstream = torch.randn(1, 4, 16, generator=generator).bfloat16()
    (pooled,), grads = gradients(op(spec), spec, tensors, upstream)
    assert pooled[0, 1].abs().max() == pooled[0, 3].abs().max() == 0.0
    used = [1, 2, 3, 5, 6, 7]
    for name in ("k", "gate"):
        per_token = grads[name][0].abs().amax(-1)
        assert (per_token > 0).nonzero().flatten().tolist() == used


def test_transformers_deepseek_v32_makes_the_same_choice():
    import transformers

    module = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = transformers.AutoConfig.for_model(
        "deepseek_v32", hidden_size=32, index_n_heads=4, index_head_dim=16, index_topk=6, q_lora_rank=24,
        qk_rope_head_dim=8,
    )  # fmt: skip
    indexer = module.DeepseekV32Indexer(config, 0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    hidden, latent = (torch.randn(1, 30, n, generator=generator) for n in (32, 24))
    angle = torch.randn(1, 30, 4, generator=generator).repeat(1, 1, 2)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()[None, None]
    taken: dict[str, torch.Tensor] = {}

    def kept(name, function):
        def call(*args, **kwargs):
            taken[name] = function(*args, **kwargs)
            return taken[name]

        return call

    rope = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = kept("rope", rope)
    try:
        listed = indexer(hidden, latent, (angle.cos(), angle.sin()), mask.squeeze(1), torch.arange(30)[None], None)
    finally:
        module.apply_rotary_pos_emb = rope
    q = indexer.wq_b(latent).view(1, 30, 4, 16)
    k = indexer.k_norm(indexer.wk(hidden))
    q_rope, k_rope = taken["rope"]
    q, k = torch.cat([q_rope, q[..., 8:]], -1), torch.cat([k_rope.squeeze(2), k[..., 8:]], -1)
    weights = indexer.weights_proj(hidden) * 4**-0.5
    with torch.no_grad():
        _, index, count = op(Spec(top_k=6, dtype="float32"))(
            q=q, k=k, weights=weights, slots=slots(6), **causal(30, 30)
        )
    assert count.tolist() == [[min(t + 1, 6) for t in range(30)]]
    for t in range(30):
        # where it sees fewer keys than slots, its list goes on with keys of the future
        assert index[0, t, : int(count[0, t])].tolist() == sorted(s for s in listed[0, t].tolist() if s <= t)


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"heads": 0}, {"activation": "silu"}, {"operation": "scores"}])
def test_impossible_specs_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must|one of"):
        Spec(**({"top_k": 8} | wrong))


def test_costs_are_those_of_a_causal_sequence():
    spec = Spec(top_k=2048, heads=64, head_dim=128, context=32768)
    # S^2 / 2 pairs of 16.4 KFLOP
    assert spec.flops(32768) == pytest.approx(8.8e12 * 1.012, rel=0.01)
    # 6 % of the pairs are chosen, three products each
    assert spec.flops(32768, backward=True) == pytest.approx(3 * 32768 * 2048 * 16384 * (1 - 1 / 32), rel=0.01)
    assert Path(CONFIGS / "nvidia_h200.json").is_file()
