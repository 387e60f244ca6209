"""The linear cross-entropy template against fp64 and torch: every flag, every way to the gradient, every reduction."""

from __future__ import annotations

import itertools
import json
import random
import zlib

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_templates import tolerance
from kernel_templates.bind import bind, bind_template
from kernel_templates.linear_cross_entropy import cases, reference, template
from kernel_templates.linear_cross_entropy.op import CONFIGS, op
from kernel_templates.linear_cross_entropy.spec import Spec
from onboarding.stages.judge import oracle, trials

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CONFIG = json.loads((CONFIGS / "interpreter.json").read_text())["rows"][0]["config"]
WAYS = {
    "twice": {},
    "one slice": {"classes": 1024},
    "kept": {"kept": 4096},
    "partly kept": {"kept": 192, "online_rows": 40, "online_classes": 128},
    "blocks": {"rows": 48, "kept": 4096, "tile_classes": 96},
    "blocks, twice": {"rows": 48},
    "storage": {"rows": 64, "kept": 200, "accumulate": "storage"},
}
FLAGS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "statistics": {"reduction": "statistics"},
    "smooth statistics": {"reduction": "statistics", "label_smoothing": 0.1},
    "bias": {"bias": True},
    "cap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "smoothing": {"label_smoothing": 0.2},
    "z-loss": {"z_loss": 1e-2},
    "frozen": {"frozen": True},
    "frozen cap": {"frozen": True, "softcap": 2.0, "logit_scale": 2.0, "z_loss": 1e-2, "bias": True},
    "everything": {"bias": True, "softcap": 4.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.5},
    "everything by row": {"bias": True, "softcap": 4.0, "label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "none"},
    "no cap": {"bias": True, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.5, "reduction": "sum"},
}


class Largest(TorchDispatchMode):
    """The largest tensor that was made, apart from what the test itself makes before it starts."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and "new_empty" in str(func):
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def operator(spec, **changes):
    """The template with the interpreter's configuration, changed."""
    config = CONFIG | changes
    name = f"loss_{zlib.crc32(repr((spec, sorted(changes.items()))).encode())}"
    return bind(bind_template(template, spec), name=name, choose_config=lambda bucket, device: config), config


def leaves(tensors, spec, dtype=None):
    """Fresh inputs; the differentiable ones require a gradient."""
    wanted = {role.name for role in spec.inputs() if role.differentiable}
    found = {}
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            found[name] = tensor
        else:
            found[name] = tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in wanted)
    return found


def gradients(outputs, inputs, upstream):
    wanted = {n: t for n, t in inputs.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(list(outputs.values()), list(wanted.values()), upstream, allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}


def check(spec, tensors, run, config, seed=0):
    """``run`` against fp64 within the tolerance table, outputs and gradients."""
    dtype = DTYPES[spec.dtype]
    generator = torch.Generator().manual_seed(seed)
    exact = leaves(tensors, spec, torch.float64)
    expected = reference.reference(exact, spec)
    upstream = [torch.randn(t.shape, generator=generator) for t in expected.values()]
    exact_grads = gradients(expected, exact, [g.double() for g in upstream])
    own = leaves(tensors, spec, torch.float32)
    rounded = reference.rounded_reference(own, spec, dtype, config)
    own_grads = gradients(rounded, own, upstream)

    given = leaves(tensors, spec)
    outputs = dict(zip(expected, run(**given), strict=True))
    grads = gradients(outputs, given, upstream)
    for name in expected:
        assert outputs[name].dtype == torch.float32
        e = tolerance.relative_rms(rounded[name], expected[name])
        tolerance.assert_close(name, outputs[name], expected[name], tolerance.limit(spec.family, dtype, e))
    for name in exact_grads:
        assert grads[name].dtype == given[name].dtype
        e = tolerance.relative_rms(own_grads[name], exact_grads[name])
        bound = tolerance.limit(spec.family, dtype, e, gradient_of=name)
        tolerance.assert_close(f"grad {name}", grads[name], exact_grads[name], bound)


def drawn(spec, dims, distribution="some_ignored", seed=0, denominator=False):
    rows, hidden, vocabulary = dims
    case = cases.Case(
        name="",
        dims={"rows": rows, "hidden": hidden, "vocabulary": vocabulary},
        dtype=spec.dtype,
        distribution=distribution,
        options={"denominator": denominator},
    )
    return cases.make_tensors(spec, case, torch.Generator().manual_seed(seed), DTYPES[spec.dtype], "cpu")


@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag(flags):
    """One way and one dtype for each flag; all of all flags are the slow test below."""
    first = list(FLAGS).index(flags)
    dtype = ("bfloat16", "float32")[first % 2]
    spec = Spec(hidden=72, vocabulary=450, dtype=dtype, **FLAGS[flags])
    run, config = operator(spec, **WAYS[list(WAYS)[first % len(WAYS)]])
    check(spec, drawn(spec, (110, 72, 450), denominator=dtype == "float32"), run, config)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag_every_way(flags, way):
    for dtype in DTYPES:
        spec = Spec(hidden=72, vocabulary=450, dtype=dtype, **FLAGS[flags])
        run, config = operator(spec, **WAYS[way])
        check(spec, drawn(spec, (110, 72, 450), denominator=dtype == "float32"), run, config)


@pytest.mark.parametrize(
    "flags", ["plain", "frozen cap", *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "everything"))]
)
def test_cases_of_the_judge(flags):
    spec = Spec(hidden=64, vocabulary=500, **FLAGS[flags])
    generator = torch.Generator().manual_seed(5)
    for case in cases.cases(spec, random.Random(5), 7, "interpreted"):
        tensors = cases.make_tensors(spec, case, generator, torch.bfloat16, "cpu")
        upstream = oracle.draw_upstream(spec, tensors, generator)
        needs = oracle.differentiable(spec, tensors)
        call = oracle.expect(oracle.Call(spec=spec, tensors=tensors, upstream=upstream, needs=needs))
        given = leaves(tensors, spec)
        found = dict(zip(upstream, op(spec)(**given), strict=True))
        found |= {f"grad {n}": g for n, g in gradients(found, given, list(upstream.values())).items()}
        for name, value in found.items():
            assert call.expected[name].compare(value).error <= call.expected[name].limit, (case.name, name)


# ---- against torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"ignore_index": 3}])
def test_torch_is_the_same_function(reduction, options):
    spec = Spec(hidden=40, vocabulary=90, dtype="float32", reduction=reduction, bias=True, **options)
    tensors = drawn(spec, (2, 40, 90))
    generator = torch.Generator().manual_seed(2)
    tensors["x"] = torch.randn(3, 11, 40, generator=generator)
    tensors["target"] = torch.randint(0, 9, (3, 11), generator=generator)
    tensors["target"][0, 4] = spec.ignore_index
    given, peer = leaves(tensors, spec), leaves(tensors, spec, torch.float64)
    (loss,) = op(spec)(**given)
    logits = F.linear(peer["x"], peer["weight"], peer["bias"]).flatten(0, 1)
    expected = F.cross_entropy(logits, peer["target"].flatten(), reduction=reduction, **options)
    upstream = torch.randn(expected.shape, generator=generator)
    found = gradients({"loss": loss}, given, [upstream.view_as(loss)])
    wanted = gradients({"loss": expected}, peer, [upstream.double()])
    tolerance.assert_close("loss", loss.flatten(), expected.flatten(), 1e-5)
    for name in wanted:
        tolerance.assert_close(name, found[name], wanted[name], 1e-5)


def test_a_vocabulary_in_shards():
    """The statistics of three shards of unequal size make the loss and the gradients of the whole."""
    whole = Spec(hidden=48, vocabulary=300, dtype="float32", label_smoothing=0.1, z_loss=1e-2, softcap=5.0)
    tensors = leaves(drawn(whole, (70, 48, 300)), whole)
    peer = leaves(tensors, whole, torch.float64)
    shards, first = [], 0
    for size in (100, 130, 70):
        options = {"label_smoothing": 0.1, "softcap": 5.0, "reduction": "statistics"}
        part = Spec(hidden=48, vocabulary=size, dtype="float32", **options)
        weight = tensors["weight"][first : first + size]
        results = op(part)(x=tensors["x"], weight=weight, target=tensors["target"] - first)
        shards.append(dict(zip(("lse", "target_logit", "total"), results, strict=True)))
        first += size
    loss = reference.merged(shards, tensors["target"], whole, denominator=torch.tensor(50.0))
    peer["denominator"] = torch.tensor(50.0)
    expected = reference.reference(peer, whole)["loss"]
    tolerance.assert_close("loss", loss, expected, 1e-5)
    found, wanted = gradients({"l": loss}, tensors, None), gradients({"l": expected}, peer, None)
    for name in wanted:
        tolerance.assert_close(name, found[name], wanted[name], 1e-5)


# ---- edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_nothing_counts(way):
    spec = Spec(hidden=32, vocabulary=50, bias=True)
    given = leaves(drawn(spec, (9, 32, 50), "all_ignored"), spec)
    # what an ignored row holds is nobody's business
    given["x"] = torch.full_like(given["x"], 1e30).requires_grad_()
    (loss,) = operator(spec, **WAYS[way])[0](**given)
    found = gradients({"loss": loss}, given, None)
    assert loss == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in found.values())


@pytest.mark.parametrize("reduction", ["mean", "none", "statistics"])
def test_no_rows(reduction):
    spec = Spec(hidden=32, vocabulary=50, reduction=reduction)
    given = leaves(drawn(spec, (0, 32, 50), "normal"), spec)
    outputs = dict(zip((r.name for r in spec.outputs()), op(spec)(**given), strict=True))
    assert outputs[spec.outputs()[0].name].shape == (() if reduction == "mean" else (0,))
    assert torch.equal(gradients(outputs, given, None if reduction == "mean" else [torch.zeros(0)] * len(outputs))
                       ["weight"], torch.zeros(50, 32, dtype=torch.bfloat16))  # fmt: skip


def test_an_impossible_target_is_no_silent_zero():
    spec = Spec(hidden=32, vocabulary=50, reduction="none")
    tensors = drawn(spec, (4, 32, 50), "normal")
    tensors["target"] = torch.tensor([0, 50, -1, 49])
    (loss,) = op(spec)(**tensors)
    assert loss.isnan().tolist() == [False, True, True, False]


def test_masked_classes():
    """A bias of minus infinity takes a class out, as padded vocabularies do; no NaN comes of it."""
    spec = Spec(hidden=32, vocabulary=200, bias=True, dtype="float32")
    tensors = drawn(spec, (20, 32, 200), "normal")
    tensors["bias"][150:] = -float("inf")
    tensors["target"] %= 150
    given, peer = leaves(tensors, spec), leaves(tensors, spec, torch.float64)
    (loss,) = op(spec)(**given)
    expected = F.cross_entropy(F.linear(peer["x"], peer["weight"][:150], peer["bias"][:150]), peer["target"])
    tolerance.assert_close("loss", loss, expected, 1e-5)
    found, wanted = gradients({"l": loss}, given, None), gradients({"l": expected}, peer, None)
    for name in wanted:
        tolerance.assert_close(name, found[name], wanted[name], 1e-5)


def test_confident_rows_keep_their_gradient():
    """p = .9995 at the target: p - 1 rounded in bf16 would be 0 or wrong by a quarter."""
    for way, flags in itertools.product(("twice", "kept"), ({}, {"frozen": True})):
        spec = Spec(hidden=64, vocabulary=400, **flags)
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(400, 64, generator=generator).bfloat16()
        target = torch.arange(100)
        x = 13.6 * weight[:100].float() / weight[:100].float().square().sum(-1, keepdim=True)
        run, config = operator(spec, **WAYS[way])
        check(spec, {"x": x.bfloat16(), "weight": weight, "target": target, "denominator": None}, run, config)


@pytest.mark.parametrize("way", ["kept", "partly kept", "blocks"])
@pytest.mark.parametrize("flags", ["plain", "frozen", "cap"])
def test_a_reference_that_moves(way, flags):
    """Logits of the third slice exceed those before by 0 to 120: what was stored follows in some rows only."""
    options = {"softcap": 100.0} if flags == "cap" else FLAGS[flags]
    spec = Spec(hidden=64, vocabulary=450, **options)
    tensors = drawn(spec, (70, 64, 450), "normal")
    tensors["weight"][390] = 0.75
    steps = torch.linspace(0.0, 5.0, 70).unsqueeze(1)
    tensors["x"] = (tensors["x"].float() * 0.3 + steps).to(torch.bfloat16)
    z = tensors["x"].double() @ tensors["weight"].double().T
    rise = z[:, 384:].amax(1) - z[:, :192].amax(1)
    assert rise.min() < template.SLACK < 100 < rise.max()
    run, config = operator(spec, **WAYS[way])
    check(spec, tensors, run, config)


def test_a_slope_of_exactly_zero_keeps_the_target_s_gradient():
    """The z-loss takes all of the softmax's coefficient at lse = -1 / (2 k); what is left is the target's."""
    spec = Spec(hidden=16, vocabulary=64, z_loss=0.25)
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weight = torch.zeros(64, 16, dtype=torch.bfloat16)
    weight[1:, 0] = -float("inf")
    weight[0, 0] = -2.0
    tensors = {"x": x, "weight": weight, "target": torch.zeros(3, dtype=torch.int64), "denominator": None}
    given = leaves(tensors, spec)
    (loss,) = operator(spec, **WAYS["kept"])[0](**given)
    found = gradients({"loss": loss}, given, None)["weight"]
    assert loss == 1.0
    assert found[0, 0] == -1.0


def test_many_blocks_that_add_up_in_the_weights_dtype():
    """8 blocks in bf16 err more than one sum, as the same roundings do in plain torch, and under the cap."""
    spec = Spec(hidden=32, vocabulary=3000)
    tensors = drawn(spec, (8 * 128, 32, 3000), "normal")
    config = CONFIG | {"kept": 4096, "rows": 128, "accumulate": "storage"}
    check(spec, tensors, operator(spec, **config)[0], config)
    exact, own = leaves(tensors, spec, torch.float64), leaves(tensors, spec, torch.float32)
    expected = gradients(reference.reference(exact, spec), exact, None)["weight"]
    errors = []
    for changes in ({}, {"rows": 1024}):
        outputs = reference.rounded_reference(own, spec, torch.bfloat16, config | changes)
        errors.append(tolerance.relative_rms(gradients(outputs, own, None)["weight"], expected))
    assert errors[1] < errors[0] < tolerance.cap(spec.family, torch.bfloat16, "weight")


def test_only_what_is_asked_for():
    spec = Spec(hidden=32, vocabulary=300, bias=True)
    tensors = drawn(spec, (40, 32, 300))
    everything = leaves(tensors, spec)
    run = op(spec)
    (whole,) = run(**everything)
    expected = gradients({"loss": whole}, everything, None)
    with torch.no_grad():
        assert torch.equal(run(**everything)[0], whole)
    for names in (("x",), ("weight",), ("bias",), ("x", "bias")):
        some = {n: t if t is None else t.detach().requires_grad_(n in names) for n, t in everything.items()}
        (loss,) = run(**some)
        # the loss does not depend on which gradients were made with it
        assert torch.equal(loss, whole)
        for name, gradient in gradients({"loss": loss}, some, None).items():
            e = tolerance.relative_rms(gradient, expected[name].double())
            assert e <= 5e-3, (names, name, e)


def test_no_case_of_the_judge_is_a_difference_of_equal_numbers():
    """All classes with one row of weights: dx is exactly 0, and what a kernel leaves there is rounding."""
    spec = Spec(hidden=64, vocabulary=500, reduction="none")
    found = [t for seed in range(3) for t in trials.draw(spec, 7, "interpreted", torch.device("cpu"), seed)]
    assert any(t.expanded[0] for t in found)
    assert ("weight", 0) not in {t.expanded for t in found if t.case.dims["rows"]}


def test_two_runs_are_bitwise_equal():
    spec = Spec(hidden=40, vocabulary=333)
    tensors = drawn(spec, (130, 40, 333))
    runs = []
    for _ in range(2):
        given = leaves(tensors, spec)
        (loss,) = op(spec)(**given)
        runs.append([loss, *gradients({"loss": loss}, given, [torch.tensor(3.0)]).values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_second_backward_is_refused():
    """The gradients were handed out: a second one would be of something that has changed."""
    spec = Spec(hidden=32, vocabulary=60)
    given = leaves(drawn(spec, (5, 32, 60)), spec)
    (loss,) = op(spec)(**given)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gave its saved gradients away"):
        loss.backward()


def test_graph_path_equals_eager_path():
    spec = Spec(hidden=32, vocabulary=300)
    tensors = drawn(spec, (40, 32, 300))
    run = op(spec)
    found = []
    for call in (run, torch.compile(lambda **t: run(**t), backend="aot_eager", fullgraph=True)):
        given = leaves(tensors, spec)
        (loss,) = call(**given)
        found.append([loss, *gradients({"loss": loss}, given, [torch.tensor(0.3)]).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_of_the_vocabularys_size_is_kept_but_the_gradient():
    """Bytes that a call holds at once, weight gradient aside, do not grow with the vocabulary."""
    largest = []
    for vocabulary in (400, 4000):
        spec = Spec(hidden=16, vocabulary=vocabulary, frozen=True)
        tensors = drawn(spec, (50, 16, vocabulary))
        with Largest() as made:
            template.forward(tensors, spec, CONFIG)
        largest.append(made.bytes)
    assert largest[0] == largest[1]


# ---- products --------------------------------------------------------------------------------------------------


def test_what_the_process_allows_its_own_products_changes_nothing():
    spec = Spec(hidden=40, vocabulary=333, dtype="float32")
    tensors = drawn(spec, (60, 40, 333))
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            given = leaves(tensors, spec)
            (loss,) = op(spec)(**given)
            found.append([loss, *gradients({"loss": loss}, given, None).values()])
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("total", "most", "size"), [(163840, 3584, 3584), (8192, 1664, 1664), (1000, 600, 512), (7, 99, 7)]
)
def test_parts_are_about_equal(total, most, size):
    """46 slices, 5 blocks, 2 parts of whole tiles, 1."""
    assert template.part_size(total, most) == size


def test_memory_of_a_training_step_does_not_hold_the_logits():
    """Largest buffers beside the gradients: [rows, slice] fp32, dW of a slice or of the vocabulary, what is kept."""
    spec = Spec(hidden=16, vocabulary=4000)
    tensors = drawn(spec, (50, 16, 4000))
    for changes, expected in (
        ({}, 50 * 192 * 4),
        ({"kept": 384}, 50 * 384 * 2),
        ({"rows": 16}, 4000 * 16 * 4),
        ({"rows": 16, "accumulate": "storage"}, 16 * 192 * 4),
    ):
        with Largest() as made:
            template.forward(tensors, spec, CONFIG | changes)
        assert made.bytes == expected, changes
