"""The definitions that roles are proven against, held against peers: torch, transformers, algebra."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernel_templates.linear_attention.reference import reference as linear_attention
from kernel_templates.linear_attention.spec import Spec
from onboarding.stages.parse.understand.masks import bias_kind, read_mask
from onboarding.stages.parse.understand.positions import frequencies, measure
from onboarding.stages.parse.understand.semantics import (
    NormForm,
    RouterForm,
    attention,
    decayed_attention,
    norm,
    pattern,
    route_choice,
    route_weights,
    selective_scan,
    state_space_dual,
)

G = torch.Generator


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=G().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked", "bidirectional"])
def test_attention_is_torchs(kind: str) -> None:
    q, k, v = normal(2, 6, 17, 8), normal(2, 2, 17, 8, seed=1), normal(2, 2, 17, 5, seed=2)
    mask = pattern(kind, 17, 4)
    got = attention(q, k, v, visible=mask, scale=0.3)
    peer = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(got, peer)


def test_a_sink_is_a_key_of_value_zero() -> None:
    q, k, v, sinks = normal(1, 3, 5, 4), normal(1, 3, 5, 4, seed=1), normal(1, 3, 5, 4, seed=2), normal(3, seed=3)
    got = attention(q, k, v, visible=pattern("full", 5), scale=1.0, sinks=sinks)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~pattern("full", 5), -torch.inf)
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None]
    torch.testing.assert_close(got, ((scores.exp() / total) @ v).transpose(1, 2))


@pytest.mark.parametrize(("kind", "extent"), [("full", None), ("sliding", 5), ("chunked", 6), ("bidirectional", None)])
def test_masks_are_read(kind: str, extent: int | None) -> None:
    visible = pattern(kind, 20, extent)
    additive = torch.zeros(1, 1, 20, 20).masked_fill(~visible, torch.finfo(torch.float32).min)
    read = read_mask(additive, 20, 20)
    assert (read.kind, read.extent if kind in ("sliding", "chunked") else None) == (kind, extent)
    assert read.bias is None


def test_a_mask_off_by_one_key_is_no_pattern() -> None:
    visible = pattern("sliding", 20, 5).clone()
    visible[12, 3] = True
    assert read_mask(visible[None, None], 20, 20).kind == "chosen"


def test_biases_are_told_apart() -> None:
    distance = (torch.arange(9)[:, None] - torch.arange(9)[None]).double()
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    seen = pattern("full", 9)
    assert bias_kind(-(slopes * distance)[None], seen, None) == "alibi"
    relative = torch.sin(distance)[None, None]
    assert bias_kind(relative, seen, relative) == "relative"
    assert bias_kind(relative, seen, relative + 1) == "data"


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rotary_formulas_are_transformers(kind: str) -> None:
    extra: dict[str, dict[str, Any]] = {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        "yarn": {"original_max_position_embeddings": 4096},
        "linear": {},
    }
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0, **extra[kind]}
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=settings)
    peer = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    torch.testing.assert_close(frequencies(settings, 64, 32768)[0][0].float(), peer)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("start", "dims"), [(0, 16), (0, 8), (8, 8)])
def test_a_rotation_is_measured(style: str, start: int, dims: int) -> None:
    angles = torch.tensor([1.3, -0.7, 0.2, 0.05, 1.0, 2.0, 0.4, 0.9][: dims // 2], dtype=torch.float64)
    before = normal(2, 3, 7, 16)
    block = before[..., start : start + dims]
    real, imaginary = block.chunk(2, -1) if style == "half" else (block[..., ::2], block[..., 1::2])
    turned = torch.complex(real.contiguous(), imaginary.contiguous()) * torch.exp(1j * angles)
    parts = torch.cat([turned.real, turned.imag], -1)
    joined = parts if style == "half" else torch.stack([turned.real, turned.imag], -1).flatten(-2)
    after = before.clone()
    after[..., start : start + dims] = joined
    found = measure(before, after)
    assert found is not None
    assert (found.style, found.start, found.dims) == (style, start, dims)
    torch.testing.assert_close(found.angles, angles)


def test_what_is_no_rotation_is_not_measured() -> None:
    before = normal(2, 3, 7, 16)
    assert measure(before, before + 0.1 * normal(2, 3, 7, 16, seed=5)) is None
    assert measure(before, before) is None


def test_norms_are_torchs() -> None:
    x, w, b = normal(4, 12), normal(12, seed=1), normal(12, seed=2)
    rms = norm(x, w, None, None, NormForm(kind="rms", eps=1e-5))
    torch.testing.assert_close(rms, F.rms_norm(x, (12,), w, 1e-5))
    layer = norm(x, w, b, None, NormForm(kind="layer", eps=1e-5))
    torch.testing.assert_close(layer, F.layer_norm(x, (12,), w, b, 1e-5))
    grouped = norm(x, w, b, None, NormForm(kind="layer", eps=1e-5, group=4))
    torch.testing.assert_close(grouped, F.group_norm(x, 3, w, b, 1e-5))


def test_renormalised_softmax_is_softmax_over_the_chosen() -> None:
    logits = normal(9, 8)
    form = RouterForm(score="softmax", top_k=3, renormalised=True, scaling=2.0)
    index = route_choice(logits, None, form)
    chosen = torch.softmax(logits.gather(-1, index), dim=-1)
    torch.testing.assert_close(route_weights(logits, index, form), 2.0 * chosen)


def test_groups_limit_the_choice() -> None:
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.5, 1.0, 1.0]], dtype=torch.float64)
    by = {how: RouterForm(score="logits", top_k=2, groups=3, kept_groups=1, group_score=how) for how in ("top2", "max")}
    assert set(route_choice(logits, None, by["max"])[0].tolist()) == {0, 1}
    assert set(route_choice(logits, None, by["top2"])[0].tolist()) == {2, 3}


def test_the_dual_form_is_linear_attention_without_the_delta_rule() -> None:
    x, dt = normal(2, 11, 4, 6), normal(2, 11, 4, seed=1).exp() * 0.1
    a, b, c = -normal(4, seed=2).exp(), normal(2, 11, 2, 5, seed=3), normal(2, 11, 2, 5, seed=4)
    spec = Spec(
        key_heads=2, value_heads=4, key_dim=5, value_dim=6, decay="head", delta=False, qk_l2norm=False, scale=1.0
    )
    tensors: dict[str, torch.Tensor | None] = {"q": c, "k": b, "v": x * dt[..., None], "g": dt * a}
    torch.testing.assert_close(state_space_dual(x, dt, a, b, c, None), linear_attention(tensors, spec)["o"])


def test_scans_agree_where_they_are_the_same() -> None:
    # one head of one channel each, one decay: Mamba's recurrence and Mamba-2's are one
    x, dt = normal(1, 9, 3, 1), normal(1, 9, 3, seed=1).exp()
    a, b, c, d = -normal(3, seed=2).exp(), normal(1, 9, 1, 4, seed=3), normal(1, 9, 1, 4, seed=4), normal(3, seed=5)
    dual = state_space_dual(x, dt, a, b, c, d)[..., 0].transpose(1, 2)
    rows = a[:, None].expand(3, 4)
    single = selective_scan(
        x[..., 0].transpose(1, 2), dt.transpose(1, 2), rows, b[:, :, 0].transpose(1, 2), c[:, :, 0].transpose(1, 2), d
    )
    torch.testing.assert_close(dual, single)


def test_decayed_attention_is_its_sum() -> None:
    q, k, v = (normal(1, 2, 6, 3, seed=s) for s in range(3))
    decay = torch.tensor([0.3, 0.9], dtype=torch.float64)
    distance = torch.arange(6)[:, None] - torch.arange(6)[None]
    weights = torch.exp(-decay[:, None, None] * distance).masked_fill(distance < 0, 0.0)
    torch.testing.assert_close(decayed_attention(q, k, v, decay), ((q @ k.transpose(-1, -2)) * weights) @ v)


def test_patterns_hold_what_they_say() -> None:
    assert int(pattern("full", 7).sum()) == 28
    assert int(pattern("sliding", 7, 3).sum()) == 3 * 7 - 3
    assert int(pattern("chunked", 7, 3).sum()) == 6 + 6 + 1
    assert math.prod(pattern("bidirectional", 7).shape) == 49
