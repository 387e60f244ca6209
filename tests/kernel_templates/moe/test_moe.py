"""The experts template against fp64 and transformers' own modules: every flag, routing and gradient."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_templates import tolerance
from kernel_templates.bind import bind, bind_template
from kernel_templates.case import Case
from kernel_templates.configs import load
from kernel_templates.moe import cases, reference, tuning
from kernel_templates.moe import template as untyped
from kernel_templates.moe.op import CONFIGS, op
from kernel_templates.moe.spec import Spec

template: Any = untyped
Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Tensor]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GPT_OSS: dict[str, Any] = {
    "limit": 2.0,
    "alpha": 1.702,
    "up_offset": 1.0,
    "bias": True,
    "transposed": True,
    "gate_up_layout": "interleaved",
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt_oss": GPT_OSS,
    "gelu": {"activation": "gelu", "gate_up_layout": "interleaved"},
    "gelu_tanh": {"activation": "gelu_tanh", "transposed": True},
    "relu": {"activation": "relu", "bias": True},
    "relu2": {"activation": "relu2", "up_offset": 0.5},
    "sigmoid": {"activation": "sigmoid", "transposed": True, "gate_up_layout": "interleaved"},
    "clamped": {"limit": 1.5, "bias": True, "transposed": True},
}
# smaller than every case: each loop and each grid axis takes more than one step
SMALL_TILES = load(CONFIGS)["interpreter"][0].config | {
    "block_m": 32, "tail_m": 16, "up_n": 16, "up_k": 16, "rows_n": 16, "rows_k": 16,
    "grad_r": 16, "grad_n": 16, "spread_r": 8, "spread_d": 16,
    "weight_p": 16, "weight_q": 16, "weight_more": 0, "weight_r": 16, "weight_copy": True,
    "combine_t": 8, "combine_d": 16, "route_block": 16, "tile_block": 4,
    "score_block": 16, "score_d": 16, "bias_r": 16, "bias_n": 16,
}  # fmt: skip


def _spec(**fields: Any) -> Spec:
    sizes: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden": 64, "intermediate": 32, "dtype": "float32"}
    return Spec(**sizes | fields)


def _case(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    routing: str = "uniform",
    fp32_scores: bool = False,
) -> Case:
    dims = {"tokens": tokens, "top_k": top_k, "experts": experts, "hidden": hidden, "intermediate": intermediate}
    return Case(name="one", dims=dims, distribution=routing, options={"fp32_scores": fp32_scores})


def _make(spec: Spec, case: Case, seed: int = 0) -> tuple[Tensors, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = cases.make_tensors(spec, case, generator, DTYPES[spec.dtype], "cpu")
    tensors = {n: t for n, t in made.items() if t is not None}
    dy = torch.randn(tensors["x"].shape, generator=generator).to(DTYPES[spec.dtype])
    return tensors, dy


def _leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    return {n: t if n == "index" else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def _run(function: Run, leaves: Tensors, dy: Tensor) -> Tensors:
    """Output and gradients by name."""
    y = function(leaves)
    names = [n for n in leaves if n != "index"]
    grads = torch.autograd.grad(y, [leaves[n] for n in names], dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def _check(spec: Spec, tensors: Tensors, dy: Tensor, run: Run) -> Tensors:
    """``run`` against fp64 within the tolerance table; returns what it computed."""
    dtype = DTYPES[spec.dtype]
    exact = _run(lambda t: reference.reference(t, spec)["y"], _leaves(tensors, torch.float64), dy)
    own = _run(lambda t: reference.rounded_reference(t, spec, dtype, {})["y"], _leaves(tensors, torch.float32), dy)
    found = _run(run, _leaves(tensors), dy)
    for name, expected in exact.items():
        of = None if name == "y" else name
        e = tolerance.relative_rms(own[name], expected)
        tolerance.assert_close(name, found[name], expected, tolerance.limit("moe", dtype, e, gradient_of=of))
    return found


def _bound(spec: Spec, config: dict[str, Any]) -> Run:
    operator = bind(bind_template(template, spec), name="moe_test", choose_config=lambda bucket, device: config)
    return lambda leaves: operator(**leaves)[0]


def _op(spec: Spec) -> Run:
    """The family's op with its shipped configuration."""
    return lambda leaves: op(spec)(**leaves)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag(flags: str, dtype: str) -> None:
    spec = _spec(dtype=dtype, **FLAGS[flags])
    seed = zlib.crc32(f"{flags}{dtype}".encode())
    # the first cases are the most telling; more of them where most flags are on
    count = 7 if flags == "gpt_oss" else 2
    for case in cases.cases(spec, random.Random(seed), count, "interpreted"):
        tensors, dy = _make(spec, case, seed)
        _check(spec, tensors, dy, _op(spec))


@pytest.mark.parametrize("flags", ["plain", "gpt_oss", "clamped"])
def test_many_small_tiles(flags: str) -> None:
    """Several tiles on every axis."""
    spec = _spec(**FLAGS[flags])
    tensors, dy = _make(spec, _case(23, 3, 4, 37, 41, "absent"))
    _check(spec, tensors, dy, _bound(spec, SMALL_TILES))


def test_tiles_of_weight_gradients_that_are_no_powers_of_two() -> None:
    """Tiles of 16 + 8: 48 columns of dW1 and 48 rows of dW2 are two of them; 64 and 32 are not whole ones."""
    spec = _spec()
    tensors, dy = _make(spec, _case(23, 3, 4, 48, 16, "absent"))
    assert (template.longer(48, 16, 8), template.longer(64, 16, 8), template.longer(32, 16, 8)) == (8, 0, 0)
    _check(spec, tensors, dy, _bound(spec, SMALL_TILES | {"weight_more": 8}))


def test_fp16_and_wide_scores() -> None:
    spec = _spec(dtype="float16")
    tensors, dy = _make(spec, _case(31, 2, 4, 48, 24, "skewed", fp32_scores=True))
    found = _check(spec, tensors, dy, _op(spec))
    assert found["scores"].dtype == torch.float32
    assert found["y"].dtype == torch.float16


def test_hidden_of_1025_and_width_of_60() -> None:
    spec = _spec(bias=True)
    tensors, dy = _make(spec, _case(9, 2, 2, 1025, 60))
    _check(spec, tensors, dy, _op(spec))


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_slots_without_an_expert_add_nothing(tokens: int) -> None:
    spec = _spec(bias=True)
    tensors, dy = _make(spec, _case(tokens, 3, 4, 32, 16))
    tensors["index"] = torch.tensor([-1, 4, 1 << 40]).expand(tokens, 3)
    found = _run(_op(spec), _leaves(tensors), dy)
    for name, value in found.items():
        assert torch.equal(value, torch.zeros_like(value)), name


def test_an_absent_slot_equals_a_shorter_top_k() -> None:
    """Absent slots and what lies in their scores (NaN) change nothing, bitwise."""
    spec = _spec()
    tensors, dy = _make(spec, _case(20, 2, 4, 32, 16))
    lonely = _run(_op(spec), _leaves(tensors), dy)
    padded = dict(tensors)
    padded["index"] = torch.cat([tensors["index"], torch.full((20, 1), 4)], 1)
    padded["scores"] = torch.cat([tensors["scores"], torch.full((20, 1), torch.nan)], 1)
    found = _run(_op(spec), _leaves(padded), dy)
    assert torch.equal(found["scores"][:, 2], torch.zeros(20))
    for name in ("y", "x", "gate_up", "down"):
        assert torch.equal(found[name], lonely[name]), name


def test_an_expert_without_rows_gets_exact_zeros_beside_infinities() -> None:
    """A neighbour's infinity must not leak through a masked row as NaN."""
    spec = _spec(bias=True)
    tensors, dy = _make(spec, _case(12, 1, 4, 32, 16))
    tensors["index"] = torch.tensor([0, 2]).repeat(6)[:, None]
    tensors["x"][1::2] = torch.inf
    found = _run(_op(spec), _leaves(tensors), dy)
    assert found["y"][0::2].isfinite().all()
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        assert found[name][0].isfinite().all(), name
        assert torch.equal(found[name][1::2], torch.zeros_like(found[name][1::2])), name


def test_routing_tables_are_a_stable_sort() -> None:
    index = torch.randint(-1, 7, (50, 3), generator=torch.Generator().manual_seed(3))
    spec = _spec()
    like = {"x": torch.empty(50, 4), "index": index, "gate_up": torch.empty(6, 4, 4), "down": torch.empty(6, 4, 2)}
    _, saved = template.outputs_like(like, spec, SMALL_TILES)
    template._route(index, saved, 6, SMALL_TILES)
    flat = index.flatten()
    routed = (flat >= 0) & (flat < 6)
    # torch's stable sort of the slots that have an expert
    slots = torch.arange(150)[routed][torch.sort(flat[routed], stable=True).indices]
    counts = torch.bincount(flat[routed], minlength=6)
    ends = counts.cumsum(0)
    assert torch.equal(saved["slot_of_row"][: len(slots)].long(), slots)
    assert torch.equal(saved["inverse"][slots].long(), torch.arange(len(slots)))
    assert torch.equal(saved["inverse"][~routed], torch.full((int((~routed).sum()),), -1, dtype=torch.int32))
    assert torch.equal(saved["offsets"].long(), torch.cat([torch.zeros(1), ends]).long())
    tiles = [(e, int(ends[e] - counts[e]) + r) for e in range(6) for r in range(0, int(counts[e]), 32)]
    found = list(zip(saved["tile_expert"].tolist(), saved["tile_row"].tolist(), strict=True))
    assert found[: len(tiles)] == tiles
    assert all(expert == -1 for expert, _ in found[len(tiles) :])


def test_two_runs_agree_bitwise() -> None:
    spec = _spec(dtype="bfloat16", **GPT_OSS)
    tensors, dy = _make(spec, _case(40, 2, 5, 48, 24, "skewed"))
    first, second = (_run(_op(spec), _leaves(tensors), dy) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("needed", [["x"], ["scores"], ["gate_up"], ["down"], ["down_bias"], ["x", "scores"]])
def test_only_what_is_needed_is_computed(needed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights run no weight gradient; every subset has the bits of the full backward."""
    spec = _spec(bias=True)
    tensors, dy = _make(spec, _case(20, 2, 4, 32, 16))
    config = load(CONFIGS)["interpreter"][0].config
    _, saved = template.forward(tensors, spec, config)
    full = template.backward(tensors, saved, {"y": dy}, {n for n in tensors if n != "index"}, spec, config)
    if not {"gate_up", "down"} & set(needed):
        monkeypatch.setattr(template, "_weight_grad_kernel", None)
    if "x" not in needed:
        monkeypatch.setattr(template, "_combine_kernel", None)
    if not {"x", "scores", "gate_up"} & set(needed):
        monkeypatch.setattr(template, "_rows_kernel", None)
    found = template.backward(tensors, saved, {"y": dy}, set(needed), spec, config)
    assert set(found) == set(needed)
    for name in needed:
        assert torch.equal(found[name], full[name]), name


def test_expanded_upstream_and_strided_inputs() -> None:
    spec = _spec()
    tensors, _ = _make(spec, _case(20, 2, 4, 32, 16))
    tensors["x"] = torch.stack([tensors["x"], tensors["x"]], 1)[:, 1]
    tensors["gate_up"] = tensors["gate_up"].transpose(1, 2).contiguous().transpose(1, 2)
    _check(spec, tensors, torch.ones(()).expand(20, 32), _op(spec))


def test_rounded_reference_takes_narrow_tensors_with_fp32_scores() -> None:
    """bf16 tensors and their fp32 copies are the same input."""
    spec = _spec(dtype="bfloat16", **GPT_OSS)
    tensors, dy = _make(spec, _case(15, 2, 3, 32, 16, fp32_scores=True))

    def rounded(leaves: Tensors) -> Tensor:
        return reference.rounded_reference(leaves, spec, torch.bfloat16, {})["y"]

    narrow = _run(rounded, _leaves(tensors), dy)
    wide = _run(rounded, _leaves(tensors, torch.float32), dy)
    for name, value in narrow.items():
        assert value.dtype == tensors.get(name, dy).dtype
        assert torch.equal(value.float(), wide[name]), name


def test_fp64_derivatives_of_the_reference() -> None:
    """The reference's autograd against finite differences, so that it may judge others."""
    spec = _spec(**GPT_OSS)
    tensors, _ = _make(spec, _case(5, 2, 3, 6, 4, "absent"))
    leaves = _leaves(tensors, torch.float64)
    names = [n for n in leaves if n != "index"]

    def y(*values: Tensor) -> Tensor:
        return reference.reference(dict(zip(names, values, strict=True), index=leaves["index"]), spec)["y"]

    assert torch.autograd.gradcheck(y, [leaves[n] for n in names])


def _transformers_experts(kind: str) -> tuple[torch.nn.Module, Spec]:
    """An experts module of transformers in eager mode, with its spec and tensors."""
    config = SimpleNamespace(
        hidden_size=32,
        num_local_experts=4,
        num_experts=4,
        moe_intermediate_size=16,
        intermediate_size=16,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )
    if kind == "kimi_linear":
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearExperts as Experts
    elif kind == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts
    module = Experts(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    spec = _spec(**(GPT_OSS | {"limit": 7.0} if kind == "gpt_oss" else {}))
    return module, spec


@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_moe", "gpt_oss"])
def test_equal_to_transformers(kind: str) -> None:
    module, spec = _transformers_experts(kind)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(30, 32, generator=generator)
    scores, index = torch.rand(30, 4, generator=generator).topk(2)
    dy = torch.randn(30, 32, generator=generator)
    parameters = dict(module.named_parameters())
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    if spec.bias:
        names |= {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
    inputs = {"x": x, "scores": scores} | {n: parameters[p].detach() for n, p in names.items()}
    mine = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    theirs_x, theirs_scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    expected = module(theirs_x, index, theirs_scores)
    expected.backward(dy)
    (y,) = op(spec)(index=index, **mine)
    torch.autograd.backward(y, dy)
    theirs = {"x": theirs_x, "scores": theirs_scores} | {n: parameters[p] for n, p in names.items()}
    tolerance.assert_close("y", y, expected.detach().double(), 1e-6)
    for name, tensor in mine.items():
        found, wanted = tensor.grad, theirs[name].grad
        assert found is not None
        assert wanted is not None
        tolerance.assert_close(name, found, wanted.double(), 1e-6)


@pytest.mark.parametrize("rows", [4, 48, 256, 2048])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_search_space_fits_the_device(rows: int, dtype: str) -> None:
    spec = _spec(dtype=dtype)
    found = tuning.space(spec, {"rows": rows})
    assert len(found) >= 8
    assert len({tuple(sorted(c.items())) for c in found}) == len(found)
    keys = set(load(CONFIGS)["interpreter"][0].config)
    for config in found:
        assert set(config) == keys
        assert tuning.fits(config, 2 if dtype == "bfloat16" else 4)


def test_shipped_configurations_are_whole() -> None:
    """Every row of every device sets every parameter, and those of a GPU fit it."""
    tables = load(CONFIGS)
    keys = set(tables["interpreter"][0].config)
    for row in tables["nvidia_h200"]:
        assert set(row.config) == keys
        assert tuning.fits(row.config, 4 if "fp32" in row.bucket else 2)


def test_flags_outlive_resizing() -> None:
    spec = dataclasses.replace(_spec(**GPT_OSS), experts=128)
    assert spec.flags() == _spec(**GPT_OSS).flags()
