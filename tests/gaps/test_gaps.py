"""Gap analysis on a parsed example: shares, floors, ranking, and the words that go with the numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onboarding.architecture import Architecture, Attention, GraphOperator
from onboarding.devices import DEVICES, find_device
from onboarding.examples import example_config
from onboarding.problem import Problem
from onboarding.stages.gaps.analyse import FAST, analyse_gaps
from onboarding.stages.gaps.attention import FAST_ATTENTION, serve_attention
from onboarding.stages.gaps.result import OperatorRow
from onboarding.stages.parse.analyse import analyse

TOKENS = 8192


@cache
def kimi() -> Architecture:
    return analyse(example_config("kimi-linear"), tokens=TOKENS, name="kimi").architecture


def test_shares_add_up_and_gaps_are_ranked_by_saving() -> None:
    result = analyse_gaps(kimi(), find_device("h200"))
    for share in ("share_time", "share_flops", "share_bytes"):
        assert sum(getattr(row, share) for row in result.rows) == pytest.approx(1.0)
    gaps = [row for row in result.rows if row.gap]
    assert [row.digest for row in gaps] == result.gaps
    assert sorted(gaps, key=lambda row: -row.saving_ms) == gaps
    assert len(result.gaps) == len(set(result.gaps)) == 10
    assert result.step_ms == pytest.approx(sum(row.provider_ms for row in result.rows))
    assert "projection" in result.basis
    assert "projection" in result.summary


def test_every_operator_is_counted_once() -> None:
    architecture = kimi()
    result = analyse_gaps(architecture, find_device("h200"))
    plain = sum(row.flops for row in architecture.graph if not row.use)
    assert sum(row.flops for row in result.rows if not row.digest) == pytest.approx(plain)
    assert {row.digest for row in result.rows if row.digest} == {use.digest for use in architecture.uses}


def test_no_provider_beats_the_roofline_and_every_number_has_a_basis() -> None:
    for key in DEVICES:
        for row in analyse_gaps(kimi(), find_device(key)).rows:
            assert row.provider_ms >= row.floor_ms * (1 - 1e-9)
            assert "assumed" in row.basis or "measured" in row.basis
            assert row.gap == (bool(row.digest) and row.floor_ms < FAST * row.provider_ms)


def test_experts_take_the_measured_time_of_their_own_shape() -> None:
    # transformers' grouped_mm, E 256 K 8 D 2304 I 1024 T 8192 on one H200: 10.53 ms forward and backward
    row = next(r for r in analyse_gaps(kimi(), find_device("h200")).rows if r.family == "moe")
    assert row.provider_ms / row.calls == pytest.approx(10.53, rel=0.02)


def test_floors_are_closed_forms() -> None:
    device = find_device("h200")
    rows = {row.name: row for row in analyse_gaps(kimi(), device).rows}
    norm = rows["RMSNorm 2304, bfloat16"]
    # read x, write y; read dy and x, write dx: five passes over T x 2304 in two bytes, 55 norms
    assert norm.floor_ms == pytest.approx(1e3 * 55 * 5 * TOKENS * 2304 * 2 / 4.27e12, rel=1e-2)
    head = rows["linear 2304 to 163840 + cross-entropy, mean, bfloat16"]
    assert head.floor_ms == pytest.approx(1e3 * 6 * TOKENS * 2304 * 163840 / 685e12, rel=1e-6)


def test_the_linear_attention_fallback_is_by_far_the_largest_gap() -> None:
    first = analyse_gaps(kimi(), find_device("h200")).rows[0]
    assert first.family == "linear_attention"
    # the fallback moves thousands of times the floor's bytes, which is why it does not fit a GPU either
    assert first.provider_ms > 100 * first.floor_ms


def test_a_faster_device_moves_the_floor() -> None:
    floors = {
        key: sum(r.floor_ms for r in analyse_gaps(kimi(), find_device(key)).rows) for key in ("a100", "h200", "b200")
    }
    assert floors["a100"] > floors["h200"] > floors["b200"]


def test_coverage_is_the_whole_step_by_provider() -> None:
    result = analyse_gaps(kimi(), find_device("h200"))
    assert sum(c.share_time for c in result.coverage) == pytest.approx(1.0)
    assert sum(c.share_flops for c in result.coverage) == pytest.approx(1.0)
    assert sum(c.operators for c in result.coverage) == len(result.rows)
    assert {c.provider for c in result.coverage} == {row.provider for row in result.rows}
    shares = [c.share_time for c in result.coverage]
    assert shares == sorted(shares, reverse=True)
    by_provider = {c.provider: c for c in result.coverage}
    assert by_provider["torch linear"].fast
    assert not by_provider["transformers torch fallback"].fast


def test_every_operator_has_its_place_on_the_roofline() -> None:
    for key in ("a100", "h200"):
        device = find_device(key)
        result = analyse_gaps(kimi(), device)
        assert result.roofline is not None
        assert result.roofline.ridge == pytest.approx(device.tflops / device.bandwidth)
        for row in result.rows:
            assert row.intensity == pytest.approx(row.flops / row.bytes_moved)
            assert (row.bound == "compute") == (row.intensity >= result.roofline.ridge)
            assert row.gain == pytest.approx(row.saving_ms / result.step_ms)
    norm = next(r for r in analyse_gaps(kimi(), find_device("h200")).rows if r.family == "norm")
    assert norm.bound == "memory"


def test_an_unknown_target_is_a_problem() -> None:
    assert find_device("MI 300X").key == "mi300x"
    with pytest.raises(Problem) as caught:
        find_device("tpu")
    assert caught.value.kind == "unknown-target"


def _published(name: str) -> dict[str, Any]:
    models = json.loads((Path(__file__).parents[1] / "parse" / "published_models.json").read_text())["models"]
    found = next(model for model in models if model["name"].startswith(name))
    return {**found["config"], "model_type": found["model_type"], "architectures": [found["architecture"]]}


@cache
def attention_rows(name: str) -> tuple[OperatorRow, ...]:
    config = {**_published(name), "num_hidden_layers": 2}
    config.pop("layer_types", None)
    architecture = analyse(config, tokens=TOKENS, name=name).architecture
    rows = analyse_gaps(architecture, find_device("h200")).rows
    return tuple(row for row in rows if row.family == "attention")


def test_a_class_without_sdpa_is_priced_as_the_torch_operators_it_runs() -> None:
    # Gemma-2 softcaps its scores: its class says `_supports_sdpa = False`, and transformers takes its own eager code
    rows = attention_rows("Gemma-2")
    assert [row.name for row in rows] == [
        "attention 16/8 x 256, window 4096, softcap 50",
        "attention 16/8 x 256, softcap 50",
    ]
    for row in rows:
        assert row.provider == "transformers eager attention"
        assert row.gap
        assert not row.digest
        assert row.saving_ms > 0
        # at least: scores written and read once in bf16, and again as fp32 probabilities, at the copy bandwidth
        scores = 16 * TOKENS**2
        assert row.provider_ms > 1e3 * (2 * 2 + 2 * 4) * scores / 4.27e12


def test_gpt_oss_sinks_are_eager_too() -> None:
    window, full = sorted(attention_rows("gpt-oss"), key=lambda row: row.floor_ms)
    assert "sinks" in window.name
    assert "window 128" in window.name
    assert "sinks" in full.name
    # the window leaves the square of scores as large as it is without
    assert window.provider_ms == pytest.approx(full.provider_ms, rel=1e-6)
    assert window.floor_ms < full.floor_ms / 10
    assert window.gap
    assert full.gap


def test_a_window_is_a_mask_tensor_over_all_scores_for_sdpa() -> None:
    (row,) = attention_rows("Mistral-7B")
    assert row.name == "attention 32/8 x 128, window 4096, mask tensor"
    assert row.provider == "torch sdpa with a mask tensor"
    # measured on one H200, 32 heads of 128, T 8192, forward and backward under a mask tensor: 12.48 ms a call
    assert row.provider_ms / row.calls == pytest.approx(12.48, rel=0.02)
    assert row.gap


@pytest.mark.parametrize(
    ("name", "words", "ms"),
    # measured in the same run: causal, no mask tensor, 32 heads
    [("Llama-3.1", "attention 32/8 x 128", 3.562), ("Kimi-Linear", "attention 32/32 x 192/128", 4.919)],
)
def test_causal_attention_is_served_by_a_fused_kernel_and_is_no_gap(name: str, words: str, ms: float) -> None:
    architecture = kimi() if name == "Kimi-Linear" else analyse(_published(name), tokens=TOKENS).architecture
    result = analyse_gaps(architecture, find_device("h200"))
    (row,) = (row for row in result.rows if row.family == "attention")
    assert row.name == words
    assert row.provider_ms / row.calls == pytest.approx(ms, rel=0.02)
    assert not row.gap
    assert next(c for c in result.coverage if c.provider == "torch sdpa").fast


def test_heads_wider_than_any_fast_kernel_takes_are_a_gap() -> None:
    narrow, wide = (
        GraphOperator(
            name="attention",
            shapes=", ".join([f"1x16x8192x{d}"] * 3),
            role="mixer",
            block="A",
            phase="forward",
            count=1,
            flops=1e12,
            bytes_moved=1e6,
            attention=Attention(implementation="sdpa", causal=True, mask=False),
        )
        for d in (256, 512)
    )
    device = find_device("h200")
    floor = device.floor_ms(1e12, 1e6)
    fast, slow = (serve_attention([op], device, floor) for op in (narrow, wide))
    assert floor / fast.ms >= FAST_ATTENTION > 0.1 > floor / slow.ms
    assert "wider than 256" in slow.basis


def test_what_no_family_covers_is_named_in_the_summary() -> None:
    config = {**_published("Gemma-2"), "num_hidden_layers": 2}
    result = analyse_gaps(analyse(config, tokens=TOKENS).architecture, find_device("h200"))
    assert "2 of no template family" in result.summary
    assert len(result.gaps) == sum(row.gap for row in result.rows) - 2
