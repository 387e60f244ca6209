"""The linear attention template against fp64 autograd of the recurrence: every variant, output and gradient."""

from __future__ import annotations

import json
import random
import zlib
from itertools import accumulate

import pytest
import torch

from kernel_templates import tolerance
from kernel_templates.case import Case
from kernel_templates.linear_attention import cases, reference, template
from kernel_templates.linear_attention.op import CONFIGS, op
from kernel_templates.linear_attention.spec import Spec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VARIANTS = {
    "kda": {},
    "gated-delta": {"decay": "head"},
    "delta": {"decay": "none"},
    "gla": {"delta": False, "qk_l2norm": False},
    "simple-gla": {"delta": False, "decay": "head", "qk_l2norm": False, "scale": 0.3},
    "plain": {"delta": False, "decay": "none"},
}
# the configuration of a GPU: chunks of 64 in two halves, channels in slices
GPU_CONFIG = next(
    row["config"]
    for row in json.loads((CONFIGS / "nvidia_h200.json").read_text())["rows"]
    if row["bucket"]["key_dim"] == 64
)


def make_spec(dtype="float32", key_heads=1, group=2, dims=(32, 16), **flags):
    return Spec(
        key_heads=key_heads, value_heads=key_heads * group, key_dim=dims[0], value_dim=dims[1], dtype=dtype, **flags
    )


def make_tensors(spec, length, kind="real", state=True, batch=1, lengths=None, seed=0):
    case = Case(
        name="",
        dims={"batch": batch, "length": length, **spec.dims()},
        distribution=kind,
        options={"initial_state": state, "lengths": lengths},
    )
    return cases.make_tensors(spec, case, torch.Generator().manual_seed(seed), DTYPES[spec.dtype], "cpu")


def make_upstream(tensors, seed=1):
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = tensors.get("cu_seqlens")
    sequences = tensors["q"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = (sequences, tensors["v"].shape[2], tensors["q"].shape[-1], tensors["v"].shape[-1])
    return {
        "o": torch.randn(tensors["v"].shape, generator=generator).to(tensors["v"].dtype),
        "final_state": 0.3 * torch.randn(state, generator=generator),
    }


def differentiate(run, tensors, upstream, dtype=None):
    """Outputs and gradients of ``run`` by autograd, on copies in ``dtype``."""
    names = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    leaves = {n: tensors[n].detach().to(dtype or tensors[n].dtype).requires_grad_() for n in names}
    outputs = run({**tensors, **leaves})
    grads = torch.autograd.grad(
        list(outputs.values()), [leaves[n] for n in names], [upstream[n].to(x.dtype) for n, x in outputs.items()]
    )
    return {**outputs, **{f"grad {n}": g for n, g in zip(names, grads, strict=True)}}


def run_op(spec):
    return lambda tensors: dict(zip(("o", "final_state"), op(spec)(**tensors), strict=True))


def run_with(spec, config, tensors, upstream):
    """Outputs and gradients of the template itself, with a configuration of the test's choice."""
    outputs, saved = template.forward(tensors, spec, config)
    needs = [n for n, x in tensors.items() if x is not None and x.is_floating_point()]
    grads = template.backward(tensors, saved, upstream, needs, spec, config)
    return {**outputs, **{f"grad {n}": g for n, g in grads.items()}}


def check(spec, tensors, found, upstream, config):
    """Every output and gradient within the tolerance table."""
    dtype = DTYPES[spec.dtype]
    exact = differentiate(lambda t: reference.reference(t, spec), tensors, upstream, torch.float64)
    rounded = differentiate(
        lambda t: reference.rounded_reference(t, spec, dtype, config), tensors, upstream, torch.float32
    )
    for name, expected in exact.items():
        e = tolerance.relative_rms(rounded[name], expected)
        source = name.removeprefix("grad ") if name.startswith("grad ") else None
        limit = tolerance.limit("linear_attention", dtype, e, gradient_of=source)
        tolerance.assert_close(name, found[name], expected, limit)
        if source:
            assert found[name].dtype == tensors[source].dtype


def check_op(spec, tensors):
    upstream = make_upstream(tensors)
    found = differentiate(run_op(spec), tensors, upstream)
    check(spec, tensors, found, upstream, op(spec).config(**tensors))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, dtype):
    spec = make_spec(dtype, **VARIANTS[variant])
    seed = zlib.crc32(f"{spec}".encode())
    generator = torch.Generator().manual_seed(seed)
    for case in cases.cases(spec, random.Random(seed), 3 if dtype == "bfloat16" else 2, "interpreted"):
        check_op(spec, cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_on_every_case(variant, dtype):
    spec = make_spec(dtype, key_heads=2, group=2, dims=(128, 128), **VARIANTS[variant])
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for case in cases.cases(spec, random.Random(seed), 14, "interpreted"):
            check_op(spec, cases.make_tensors(spec, case, generator, DTYPES[dtype], "cpu"))


def test_fp16():
    spec = make_spec("float16")
    check_op(spec, make_tensors(spec, 40, "bounded"))


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_lengths_around_a_chunk(length):
    spec = make_spec()
    check_op(spec, make_tensors(spec, length, "bounded"))


@pytest.mark.parametrize("dims", [(60, 100), (16, 12)])
def test_odd_head_dims(dims):
    spec = make_spec(dims=dims, group=1)
    check_op(spec, make_tensors(spec, 21))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(192, 256), (256, 64), (100, 192)])
def test_wide_head_dims(dims):
    spec = make_spec("bfloat16", dims=dims, group=1)
    check_op(spec, make_tensors(spec, 37, "bounded"))


@pytest.mark.parametrize(
    ("variant", "dtype", "kind"),
    [
        # one block, blocks of 32 rows, blocks of 16 rows: what the decays allow
        ("kda", "bfloat16", "slow"),
        ("kda", "bfloat16", "bounded"),
        ("kda", "bfloat16", "strong"),
        ("kda", "float32", "strong"),
        # a beta far below fp16's smallest number, in which the solve's factors are
        ("kda", "bfloat16", "beta_edges"),
        ("gated-delta", "bfloat16", "beta_edges"),
        ("gated-delta", "float32", "real"),
    ],
)
def test_chunks_of_64_in_halves(variant, dtype, kind):
    spec = make_spec(dtype, group=1, dims=(40, 32), **VARIANTS[variant])
    config = {
        **GPU_CONFIG,
        "gram_bk": 32,
        "gradient_bk": 32,
        "scan_bv": 16,
        "reverse_bv": 16,
        "score_bv": 16,
        "output_bv": 16,
        "prepare_bk": 32,
    }
    tensors = make_tensors(spec, 150, kind)
    upstream = make_upstream(tensors)
    check(spec, tensors, run_with(spec, config, tensors, upstream), upstream, config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["real", "bounded", "slow", "strong", "correlated"])
def test_gpu_configuration(variant, dtype, kind):
    spec = make_spec(dtype, group=2, dims=(40, 32), **VARIANTS[variant])
    tensors = make_tensors(spec, 150, kind, lengths=[63, 64, 0, 23])
    upstream = make_upstream(tensors)
    check(spec, tensors, run_with(spec, GPU_CONFIG, tensors, upstream), upstream, GPU_CONFIG)


@pytest.mark.parametrize("variant", ["kda", "gated-delta"])
def test_packed_is_each_sequence_alone(variant):
    spec = make_spec(**VARIANTS[variant])
    lengths = [0, 17, 1, 32, 0, 15]
    tensors = make_tensors(spec, sum(lengths), lengths=lengths)
    upstream = make_upstream(tensors)
    config = op(spec).config(**tensors)
    packed = run_with(spec, config, tensors, upstream)
    for n, (start, end) in enumerate(zip([0, *accumulate(lengths)], accumulate(lengths), strict=False)):
        own = {name: tensors[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        own["initial_state"] = tensors["initial_state"][n : n + 1]
        own_upstream = {"o": upstream["o"][:, start:end], "final_state": upstream["final_state"][n : n + 1]}
        alone = run_with(spec, config, {m: x.contiguous() for m, x in own.items()}, own_upstream)
        for name, value in alone.items():
            part = packed[name][n : n + 1] if "state" in name else packed[name][:, start:end]
            tolerance.assert_close(f"{name} of sequence {n}", part, value.double(), 2e-6)


def test_state_joins_two_halves():
    spec = make_spec()
    tensors = make_tensors(spec, 56)
    whole = run_op(spec)(tensors)
    first = {n: x[:, :24] for n, x in tensors.items() if n not in ("initial_state", "cu_seqlens")}
    second = {n: x[:, 24:] for n, x in tensors.items() if n not in ("initial_state", "cu_seqlens")}
    half = run_op(spec)({**first, "initial_state": tensors["initial_state"]})
    rest = run_op(spec)({**second, "initial_state": half["final_state"]})
    tolerance.assert_close("o", torch.cat((half["o"], rest["o"]), 1), whole["o"].double(), 1e-6)
    tolerance.assert_close("final_state", rest["final_state"], whole["final_state"].double(), 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("decay", ["channel", "head"])
def test_decays_that_forget_everything(decay, dtype):
    spec = make_spec(dtype, decay=decay)
    tensors = make_tensors(spec, 37)
    tensors["g"][:, ::3] = -1e4
    tensors["g"][:, 1] = 0.0
    tensors["g"][:, 20] = -3e38
    check_op(spec, tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_beta_of_exactly_zero_and_one(dtype):
    spec = make_spec(dtype)
    tensors = make_tensors(spec, 37)
    tensors["beta"][:, ::3] = 0.0
    tensors["beta"][:, 1::3] = 1.0
    check_op(spec, tensors)


def test_zero_keys_and_queries():
    spec = make_spec()
    tensors = make_tensors(spec, 21)
    tensors["q"][:, 3:5] = 0.0
    tensors["k"][:, 4:6] = 0.0
    # x / sqrt(x.x + eps) has a gradient of 1 / sqrt(eps) there
    check_op(spec, tensors)


@pytest.mark.parametrize("lengths", [None, [5, 0, 16]])
def test_memory_past_the_tensors_is_not_read(lengths):
    spec = make_spec("bfloat16", dims=(20, 12))
    tensors = make_tensors(spec, 21, lengths=lengths)
    upstream = make_upstream(tensors)

    def poisoned(x):
        if x is None or not x.is_floating_point():
            return x
        buffer = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype)
        buffer[: x.numel()] = x.flatten()
        return buffer[: x.numel()].view(x.shape)

    config = op(spec).config(**tensors)
    clean = run_with(spec, config, tensors, upstream)
    found = run_with(
        spec, config, {n: poisoned(x) for n, x in tensors.items()}, {n: poisoned(x) for n, x in upstream.items()}
    )
    for name in clean:
        assert torch.equal(found[name], clean[name]), name


def test_strides_and_repetition():
    """Views of a fused projection give the same bits as copies, and a second run the same as the first."""
    spec = make_spec(key_heads=2, group=1, dims=(32, 32))
    tensors = make_tensors(spec, 19)
    fused = torch.cat([tensors[n].transpose(1, 2) for n in ("q", "k", "v")], dim=-1)
    views = dict(zip(("q", "k", "v"), (x.transpose(1, 2) for x in fused.split(32, dim=-1)), strict=True))
    upstream = make_upstream(tensors)
    strided = {**upstream, "o": upstream["o"].transpose(1, 3).contiguous().transpose(1, 3)}
    first = differentiate(run_op(spec), tensors, upstream)
    second = differentiate(run_op(spec), {**tensors, **views}, strided)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_missing_upstream_gradients_are_zero():
    spec = make_spec()
    tensors = make_tensors(spec, 19)
    upstream = make_upstream(tensors)
    config = op(spec).config(**tensors)
    saved = template.forward(tensors, spec, config)[1]
    for absent in ("o", "final_state"):
        given = {**upstream, absent: None}
        zeros = {**upstream, absent: torch.zeros_like(upstream[absent])}
        some = template.backward(tensors, saved, given, {"k", "g"}, spec, config)
        full = template.backward(tensors, saved, zeros, {"k", "g"}, spec, config)
        assert set(some) == {"k", "g"}
        assert all(torch.equal(some[n], full[n]) for n in some)


@pytest.mark.parametrize("lengths", [None, [0, 0]])
def test_no_tokens(lengths):
    spec = make_spec()
    tensors = make_tensors(spec, 0, lengths=lengths)
    upstream = make_upstream(tensors)
    found = differentiate(run_op(spec), tensors, upstream)
    assert torch.equal(found["final_state"], tensors["initial_state"])
    assert torch.equal(found["grad initial_state"], upstream["final_state"])
    without = run_op(spec)({**tensors, "initial_state": None})
    assert not without["final_state"].any()


@pytest.mark.parametrize("lengths", [[0, 1, 63, 64, 65, 0, 0, 130, 0], [7], [0], [64, 64]])
def test_chunk_table(lengths):
    bounds = [0, *accumulate(lengths)]
    chunks, offsets = template.chunk_table(torch.tensor(bounds, dtype=torch.int32), bounds[-1], 64)
    expected = [
        (start + first, min(64, length - first))
        for start, length in zip(bounds, lengths, strict=False)
        for first in range(0, length, 64)
    ]
    assert [tuple(row) for row in chunks.tolist() if row[1]] == expected
    assert [tuple(row) for row in chunks.tolist()][: len(expected)] == expected
    assert offsets.tolist() == [0, *accumulate(-(-length // 64) for length in lengths)]
    assert len(chunks) == bounds[-1] // 64 + len(lengths)
