"""The sparse attention template against fp64 and other definitions: every flag, list and gradient."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_templates import tolerance
from kernel_templates.bind import bind, bind_template
from kernel_templates.case import Case
from kernel_templates.configs import load
from kernel_templates.sparse_attention import cases, reference, tuning
from kernel_templates.sparse_attention import template as untyped
from kernel_templates.sparse_attention.op import CONFIGS, op
from kernel_templates.sparse_attention.spec import Spec

template: Any = untyped
Tensors = dict[str, Tensor]
Run = Callable[[Tensors], Tensors]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LATENT: dict[str, Any] = {"rope": True, "rope_dim": 8, "scale": 0.2}
GROUPED: dict[str, Any] = {"kv_heads": 2, "value_dim": 24, "separate": True}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": LATENT,
    "latent, sink, target": {**LATENT, "sink": True, "target": True},
    "key heads": GROUPED,
    "key heads, sink, target": {**GROUPED, "sink": True, "target": True},
    "key heads, rope": {**GROUPED, **LATENT},
    "unordered sums": {**LATENT, "deterministic": False},
}
CONFIG = load(CONFIGS)["interpreter"][0].config
# smaller than every case: each loop and grid axis takes more than one step, a chunk is one query
SMALL_TILES = CONFIG | {
    "block_h": 16, "count_slots": 16, "forward_slots": 16, "forward_columns": 16, "score_slots": 16, "query_slots": 16,
    "query_columns": 16, "key_slots": 16, "key_columns": 16, "key_heads": 16, "sum_entries": 2, "sum_columns": 16,
    "delta_rows": 4, "workspace_kib": 0,
}  # fmt: skip


def _spec(**fields: Any) -> Spec:
    sizes: dict[str, Any] = {"heads": 8, "key_dim": 48, "value_dim": 48, "top_k": 32, "dtype": "float32"}
    return Spec(**sizes | fields)


def _case(
    tokens: int = 12,
    keys: int = 30,
    groups: int = 1,
    heads: int = 4,
    columns: int = 32,
    value: int = 16,
    rope: int = 8,
    slots: int = 20,
    lists: str = "causal",
    by_group: bool = False,
) -> Case:
    dims = {"tokens": tokens, "keys": keys, "groups": groups, "heads": heads, "columns": columns}
    dims |= {"value": value, "rope": rope, "slots": slots}
    return Case(name="one", dims=dims, distribution=lists, options={"by_group": by_group})


def _make(spec: Spec, case: Case, seed: int = 0) -> tuple[Tensors, Tensor]:
    """Inputs and what flows into o."""
    generator = torch.Generator().manual_seed(seed)
    made = cases.make_tensors(spec, case, generator, DTYPES[spec.dtype], "cpu")
    tensors = {n: t for n, t in made.items() if t is not None}
    value = tensors["v" if spec.separate else "k"].shape[2]
    do = torch.randn(*tensors["q"].shape[:2], value, generator=generator).to(DTYPES[spec.dtype])
    return tensors, do


def _leaves(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    return {n: t if n == "index" else t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def _run(function: Run, leaves: Tensors, do: Tensor) -> Tensors:
    """Outputs and gradients by name."""
    outputs = function(leaves)
    names = [n for n in leaves if n != "index"]
    grads = torch.autograd.grad(outputs["o"], [leaves[n] for n in names], do.to(outputs["o"].dtype))
    return {**{n: t.detach() for n, t in outputs.items()}, **dict(zip(names, grads, strict=True))}


def _check(spec: Spec, tensors: Tensors, do: Tensor, run: Run) -> Tensors:
    """``run`` against fp64 within the tolerance table; returns what it computed."""
    dtype = DTYPES[spec.dtype]
    exact = _run(lambda t: reference.reference(t, spec), _leaves(tensors, torch.float64), do)
    own = _run(lambda t: reference.rounded_reference(t, spec, dtype, {}), _leaves(tensors, torch.float32), do)
    found = _run(run, _leaves(tensors), do)
    for name, expected in exact.items():
        of = None if name in ("o", "target") else name
        e = tolerance.relative_rms(own[name], expected)
        tolerance.assert_close(name, found[name], expected, tolerance.limit("sparse_attention", dtype, e, of))
    return found


def _named(spec: Spec, results: tuple[Tensor, ...]) -> Tensors:
    return dict(zip((role.name for role in spec.outputs()), results, strict=True))


def _op(spec: Spec) -> Run:
    """The family's op with its shipped configuration."""
    return lambda leaves: _named(spec, op(spec)(**leaves))


def _bound(spec: Spec, config: dict[str, Any]) -> Run:
    operator = bind(bind_template(template, spec), name="sparse_test", choose_config=lambda bucket, device: config)
    return lambda leaves: _named(spec, operator(**leaves))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag(flags: str, dtype: str) -> None:
    spec = _spec(dtype=dtype, **FLAGS[flags])
    seed = zlib.crc32(f"{flags}{dtype}".encode())
    for case in cases.cases(spec, random.Random(seed), 5, "interpreted"):
        tensors, do = _make(spec, case, seed)
        _check(spec, tensors, do, _op(spec))


@pytest.mark.parametrize("lists", cases.LISTS)
@pytest.mark.parametrize("flags", ["latent, sink, target", "key heads, sink, target"])
def test_every_list_in_many_small_tiles(flags: str, lists: str) -> None:
    """Several tiles on every axis, a chunk for every query."""
    spec = _spec(**FLAGS[flags])
    case = _case(9, 40, spec.kv_heads, 18 // spec.kv_heads, 33, 20, 19, 37, lists, by_group=lists == "gaps")
    tensors, do = _make(spec, case, seed=zlib.crc32(lists.encode()))
    _check(spec, tensors, do, _bound(spec, SMALL_TILES))


@pytest.mark.parametrize("flags", ["latent, sink, target", "key heads, sink, target"])
def test_forward_in_two(flags: str) -> None:
    """Weights, then values: several tiles with their own largest score, a chunk for every query, rows without keys."""
    spec = _spec(**FLAGS[flags])
    for lists in ("gaps", "empty_rows"):
        case = _case(7, 40, spec.kv_heads, 18 // spec.kv_heads, 33, 20, 19, 37, lists)
        tensors, do = _make(spec, case, seed=11)
        found = _check(spec, tensors, do, _bound(spec, SMALL_TILES | {"forward_split": 1, "weight_slots": 16}))
        one = _bound(spec, SMALL_TILES)(_leaves(tensors))["o"]
        torch.testing.assert_close(found["o"], one.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [0, 1])
def test_heads_as_rows_of_the_products(split: int) -> None:
    """Sixty-four heads a block; forty of them are there."""
    spec = _spec(**FLAGS["latent, sink, target"])
    tensors, do = _make(spec, _case(5, 30, 1, 40, 24, 24, 8, 37, "gaps"), seed=12)
    _check(spec, tensors, do, _bound(spec, CONFIG | {"block_h": 64, "forward_split": split}))


def test_fp16() -> None:
    spec = _spec(dtype="float16", sink=True, **LATENT)
    tensors, do = _make(spec, _case(slots=33))
    found = _check(spec, tensors, do, _op(spec))
    assert found["o"].dtype == torch.float16


def test_equals_sdpa_with_a_mask() -> None:
    """A definition from elsewhere: torch's attention of 6 query heads on 2 key heads, with the lists as a mask."""
    spec = _spec(kv_heads=2, separate=True)
    tensors, do = _make(spec, _case(14, 25, 2, 3, 32, 16, slots=9))
    found = _run(_op(spec), _leaves(tensors), do)
    leaves = _leaves(tensors, torch.float64)
    mask = torch.zeros(14, 26, dtype=torch.bool).scatter_(1, tensors["index"].long() % 26, True)[:, :25]
    q, k, v = (leaves[n].transpose(0, 1) for n in "qkv")
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    grads = torch.autograd.grad(o, [leaves[n] for n in "qkv"], do.double())
    for name, expected in zip("oqkv", (o.detach(), *grads), strict=True):
        tolerance.assert_close(name, found[name], expected, 1e-5)


def test_absorbed_projections_equal_plain_heads() -> None:
    """q W^T against the latent, and (P latent) W_v, is multi-head attention on expanded keys and values."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, q_rope, latent, k_rope = normal(10, 4, 12), normal(10, 4, 8), normal(18, 24), normal(18, 8)
    to_key, to_value = normal(4, 12, 24) / 5, normal(4, 16, 24) / 5
    index = torch.stack([torch.randperm(18, generator=generator)[:7] for _ in range(10)]).int()
    spec = _spec(rope=True, rope_dim=8, scale=20**-0.5)
    o = op(spec)(
        q=torch.einsum("thd,hdc->thc", q, to_key).float(),
        k=latent[:, None].float(),
        q_rope=q_rope.float(),
        k_rope=k_rope[:, None].float(),
        index=index,
    )[0]
    found = torch.einsum("thc,hvc->thv", o.double(), to_value)
    keys = torch.cat([torch.einsum("sc,hdc->shd", latent, to_key), k_rope[:, None].expand(-1, 4, -1)], -1)
    values = torch.einsum("sc,hvc->shv", latent, to_value)
    scores = torch.einsum("thd,tshd->ths", torch.cat([q, q_rope], -1), keys[index.long()]) * 20**-0.5
    expected = torch.einsum("ths,tshv->thv", scores.softmax(-1), values[index.long()])
    tolerance.assert_close("o", found, expected, 1e-5)


def test_target_sums_to_the_heads() -> None:
    """Without a sink each head's probabilities sum to one, so a row of the target sums to its heads."""
    spec = _spec(target=True, **LATENT)
    tensors, _ = _make(spec, _case(11, 40, heads=18, slots=33, lists="gaps"))
    target = op(spec)(**tensors)[1]
    inside = (tensors["index"] >= 0) & (tensors["index"] < 40)
    rows = inside.any(1)
    tolerance.assert_close("sums", target.sum(1)[rows], torch.full((int(rows.sum()),), 18.0).double(), 1e-6)
    assert not target[~inside].any()


@pytest.mark.parametrize("flags", ["latent, sink, target", "key heads, sink, target", "unordered sums"])
def test_what_no_list_names_is_never_read(flags: str) -> None:
    """Keys that no list names may hold NaN, row 0 among them: nothing changes, bitwise; their gradients are zero."""
    spec = _spec(dtype="bfloat16", **FLAGS[flags])
    tensors, do = _make(spec, _case(11, 40, spec.kv_heads, slots=33, lists="gaps"))
    index = tensors["index"]
    index[index == 0] = -1
    index[3] = -1
    index[5, ::2] = 40
    index[6, ::3] = torch.iinfo(torch.int32).min
    clean = _run(_op(spec), _leaves(tensors), do)
    named = torch.zeros(40, dtype=torch.bool)
    named[index[(index >= 0) & (index < 40)].long()] = True
    assert not named[0]
    poisoned = dict(tensors)
    for name in {"k", "v", "k_rope"} & set(tensors):
        poisoned[name] = tensors[name].clone()
        poisoned[name][~named] = torch.nan
    found = _run(_op(spec), _leaves(poisoned), do)
    for name, expected in clean.items():
        if not spec.deterministic and name.startswith("k"):
            tolerance.assert_close(name, found[name].double(), expected.double(), 5e-3)
        else:
            assert torch.equal(found[name], expected), name
    for name in {"k", "v", "k_rope"} & set(tensors):
        assert not found[name][~named].any()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("tokens", "keys", "slots"), [(0, 9, 4), (5, 0, 4), (5, 9, 0), (5, 9, 4)])
def test_rows_without_a_key_are_zero(tokens: int, keys: int, slots: int, sink: bool) -> None:
    spec = _spec(sink=sink, target=True, **LATENT)
    tensors, do = _make(spec, _case(tokens, max(keys, 1), slots=max(slots, 1)))
    tensors["k"], tensors["k_rope"] = tensors["k"][:keys], tensors["k_rope"][:keys]
    tensors["index"] = torch.full((tokens, slots), -1, dtype=torch.int32)
    found = _run(_op(spec), _leaves(tensors), do)
    for name, value in found.items():
        assert torch.equal(value, torch.zeros_like(value)), name


def test_a_padded_list_is_the_list() -> None:
    """Slots without a key, wherever they are, change no bit of a row that keeps its order and its tiles."""
    spec = _spec(dtype="bfloat16", **LATENT)
    tensors, do = _make(spec, _case(slots=20))
    short = _run(_op(spec), _leaves(tensors), do)
    tensors["index"] = torch.nn.functional.pad(tensors["index"], (0, 2063 - 20), value=-1)
    found = _run(_op(spec), _leaves(tensors), do)
    for name, expected in short.items():
        assert torch.equal(found[name], expected), name


def test_a_key_listed_twice_counts_twice() -> None:
    """As if the key stood twice in k: the gradient of the one is the sum of the two's."""
    spec = _spec(**LATENT)
    tensors, do = _make(spec, _case(6, 10, slots=5, lists="random"))
    tensors["index"][:, 4] = tensors["index"][:, 1]
    twice = _run(_op(spec), _leaves(tensors), do)
    apart = dict(tensors)
    apart["k"], apart["k_rope"] = (torch.cat([tensors[n], tensors[n]]) for n in ("k", "k_rope"))
    apart["index"] = tensors["index"].clone()
    apart["index"][:, 4] += 10
    found = _run(_op(spec), _leaves(apart), do)
    tolerance.assert_close("o", twice["o"], found["o"].double(), 1e-6)
    for name in ("k", "k_rope"):
        tolerance.assert_close(name, twice[name], (found[name][:10] + found[name][10:]).double(), 1e-5)


def test_documents_equal_runs_of_their_own() -> None:
    """Packed sequences with indices absolute in the buffer."""
    spec = _spec(dtype="bfloat16", sink=True, **LATENT)
    whole, do = _make(spec, _case(30, 30, slots=12, lists="documents"))
    found = _run(_op(spec), _leaves(whole), do)
    for first in range(0, 30, 10):
        rows = slice(first, first + 10)
        own = {n: t if n == "sink" else t[rows].clone() for n, t in whole.items()}
        own["index"] = torch.where(own["index"] < 0, -1, own["index"] - first)
        alone = _run(_op(spec), _leaves(own), do[rows])
        for name in set(alone) - {"sink"}:
            assert torch.equal(found[name][rows], alone[name]), name


def test_scores_far_apart() -> None:
    """Scores of fifty, either sign: the softmax is nearly one key, and its origin moves from tile to tile."""
    spec = _spec(sink=True, scale=1.0)
    tensors, do = _make(spec, _case(slots=20))
    tensors["q"] *= 15
    found = _check(spec, tensors, do, _bound(spec, SMALL_TILES))
    assert all(t.isfinite().all() for t in found.values())


def test_two_runs_and_any_chunk_agree_bitwise() -> None:
    """Sums over a key's slots are ordered; where a chunk ends, one more fp32 addition may fall differently."""
    spec = _spec(dtype="bfloat16", sink=True, target=True, **LATENT)
    tensors, do = _make(spec, _case(25, 40, slots=33))
    first, second = (_run(_op(spec), _leaves(tensors), do) for _ in range(2))
    chunked = _run(_bound(spec, CONFIG | {"workspace_kib": 20}), _leaves(tensors), do)
    for name in first:
        assert torch.equal(first[name], second[name]), name
        if name.startswith("k"):
            tolerance.assert_close(name, chunked[name], first[name].double(), 1e-3)
        else:
            assert torch.equal(first[name], chunked[name]), name


@pytest.mark.parametrize("needed", [["q"], ["k"], ["v"], ["q_rope"], ["k_rope"], ["sink"], ["q", "v"], ["k", "sink"]])
def test_only_what_is_needed_is_computed(needed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset has the bits of the full backward; what nobody needs is not launched."""
    spec = _spec(sink=True, **GROUPED, **LATENT)
    tensors, do = _make(spec, _case(groups=2))
    _, saved = template.forward(tensors, spec, CONFIG)
    full = template.backward(tensors, saved, {"o": do}, set(tensors) - {"index"}, spec, CONFIG)
    if not {"q", "q_rope"} & set(needed):
        monkeypatch.setattr(template, "_query_grad_kernel", None)
    if not {"k", "v", "k_rope"} & set(needed):
        monkeypatch.setattr(template, "_key_grad_kernel", None)
        monkeypatch.setattr(template, "_sum_kernel", None)
    if needed == ["sink"]:
        monkeypatch.setattr(template, "_slot_kernel", None)
    found = template.backward(tensors, saved, {"o": do}, set(needed), spec, CONFIG)
    assert set(found) == set(needed)
    for name in needed:
        assert torch.equal(found[name], full[name]), name


def test_expanded_upstream_and_strided_inputs() -> None:
    spec = _spec(**LATENT)
    tensors, _ = _make(spec, _case())
    tensors["q"] = torch.stack([tensors["q"], tensors["q"]], 1)[:, 1]
    tensors["k"] = tensors["k"].transpose(0, 2).contiguous().transpose(0, 2)
    tensors["index"] = tensors["index"].repeat_interleave(2, 1)[:, ::2].long()
    _check(spec, tensors, torch.ones(()).expand(12, 4, 32), _op(spec))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"index": torch.zeros(3, 5, dtype=torch.int32)}, "index"),
        ({"index": torch.zeros(12, 3, 5, dtype=torch.int32)}, "index"),
        ({"k": torch.zeros(30, 1, 31)}, "columns must agree"),
        ({"k": torch.zeros(30, 3, 32)}, "columns must agree"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changed: Tensors, words: str) -> None:
    spec = _spec()
    tensors, _ = _make(spec, _case())
    with pytest.raises(ValueError, match=words):
        template.forward(tensors | changed, spec, CONFIG)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"rope": True}, "rope_dim is 0"),
        ({"rope_dim": 8}, "rope_dim is 8"),
        ({"value_dim": 16}, "must be key_dim"),
        ({"scale": 0.0}, "scale"),
        ({"top_k": 0}, "positive"),
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _spec(**fields)


def test_fp64_derivatives_of_the_reference() -> None:
    """The reference's autograd against finite differences, so that it may judge others."""
    spec = _spec(sink=True, **GROUPED, **LATENT)
    tensors, _ = _make(spec, _case(4, 7, 2, 2, 5, 3, 3, 6, "gaps"))
    tensors["index"][0, 2] = tensors["index"][0, 3]
    leaves = _leaves(tensors, torch.float64)
    names = [n for n in leaves if n != "index"]

    def o(*values: Tensor) -> Tensor:
        return reference.reference(dict(zip(names, values, strict=True)) | {"index": leaves["index"]}, spec)["o"]

    assert torch.autograd.gradcheck(o, [leaves[n] for n in names])


@pytest.mark.parametrize("columns", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_search_space_fits_the_device(columns: int, dtype: str) -> None:
    spec = _spec(dtype=dtype)
    found = tuning.space(spec, {"heads": 64, "columns": columns})
    assert len(found) >= 8
    assert len({tuple(sorted(c.items())) for c in found}) == len(found)
    for config in found:
        assert set(config) == set(CONFIG)
        assert tuning.fits(config, columns, 2 if dtype == "bfloat16" else 4)


def test_shipped_configurations_are_whole() -> None:
    """Every row of every device sets every parameter, and those of a GPU fit it."""
    for row in load(CONFIGS)["nvidia_h200"]:
        assert set(row.config) == set(CONFIG)
        assert tuning.fits(row.config, row.bucket.get("columns", 512), 4 if "fp32" in row.bucket else 2)
