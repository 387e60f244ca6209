"""Growth with the sequence, memory, learned positions, loops over tokens, and the vision tower."""

from __future__ import annotations

from typing import Any

import pytest

from onboarding.architecture import Growth
from onboarding.stages.parse.analyse import Parsed, analyse
from onboarding.stages.parse.growth import add, law, scale

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "projection_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize("one", [Growth(constant=7, linear=3), Growth(linear=5, quadratic=2), Growth(constant=4)])
def test_a_law_goes_through_its_two_points_and_on(one: Growth) -> None:
    found = law(one.at(512), one.at(1024), 1024)
    for tokens in (512, 1024, 10**6):
        assert found.at(tokens) == pytest.approx(one.at(tokens))


def test_laws_add_up() -> None:
    total = add([Growth(constant=1, linear=2), scale(Growth(linear=1, quadratic=3), 4)])
    assert (total.constant, total.linear, total.quadratic) == (1, 6, 12)


def step_flops(parsed: Parsed) -> float:
    return sum(row.flops for row in parsed.architecture.graph)


def test_growth_foretells_a_longer_trace() -> None:
    short, long = analyse(LLAMA, tokens=512), analyse(LLAMA, tokens=2048)
    assert short.architecture.growth is not None
    assert short.architecture.growth.at(512) == pytest.approx(step_flops(short))
    assert short.architecture.growth.at(2048) == pytest.approx(step_flops(long), rel=1e-4)
    block = short.architecture.blocks[0]
    assert block.growth is not None
    assert block.growth.at(2048) == pytest.approx(long.architecture.blocks[0].flops)
    assert short.architecture.memory is not None
    assert long.architecture.memory is not None
    for name in ("activations", "recomputed"):
        foretold, seen = (getattr(p.architecture.memory, name).at(2048) for p in (short, long))
        assert foretold == pytest.approx(seen, rel=1e-4)


def test_memory_of_weights_is_exact_and_of_activations_plausible() -> None:
    parsed = analyse(LLAMA, tokens=512)
    memory, count = parsed.architecture.memory, parsed.architecture.census.total
    assert memory is not None
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * count, 2 * count, 12 * count)
    kept, recomputed = memory.activations.at(512), memory.recomputed.at(512)
    # a layer keeps at least two norms' inputs, q, k, v, the attention's output and the feed-forward's three products
    floor = 2 * 512 * (2 * 128 + 128 + 2 * 64 + 128 + 3 * 256)
    assert kept > 3 * floor
    assert recomputed < kept
    # logits in bfloat16, and their log-softmax in float32
    assert recomputed > 512 * 512 * 4
    assert memory.total(512) < memory.total(512, recompute=False)


def test_a_table_of_positions_ends_the_sequence() -> None:
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 96}
    parsed = analyse({"model_type": "gpt2", **small}, tokens=512)
    assert parsed.architecture.sequence_length == 96
    assert any("96 tokens" in warning for warning in parsed.architecture.warnings)
    # RoBERTa's positions start behind the padding token: 66 rows hold 64 positions
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    roberta = {"model_type": "roberta", "max_position_embeddings": 66, "vocab_size": 128, "is_decoder": True, **small}
    assert analyse(roberta, tokens=512).architecture.sequence_length == 64


@pytest.mark.slow
def test_a_loop_over_tokens_is_measured_short_and_extended() -> None:
    config = {
        "model_type": "recurrent_gemma", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
        "vocab_size": 256, "num_attention_heads": 4, "lru_width": 64, "attention_window_size": 64,
    }  # fmt: skip
    parsed = analyse(config, tokens=4096)
    assert parsed.trace.backward
    scans = [op for op in parsed.trace.operations if op.leaf is not None and op.leaf.kind == "scan"]
    assert {op.phase for op in scans} == {"forward", "backward"}
    forward = next(op for op in scans if op.phase == "forward")
    # one multiplication and one addition a step and channel at least
    assert forward.flops >= 2 * 4096 * 64
    assert len(parsed.trace.operations) < 2000


def test_the_vision_tower_is_traced_forward_and_backward() -> None:
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": VISION, "image_token_index": 511}
    parsed = analyse(config, tokens=256)
    assert parsed.trace.tower
    rows = [row for row in parsed.architecture.graph if row.role == "vision tower"]
    assert {row.phase for row in rows} == {"forward", "backward"}
    linear = sum(row.flops for row in rows if row.phase == "forward" and row.name in ("addmm", "mm"))
    # 16 patches and a class token; four projections and two matrices a layer; the projector 64 -> 128 -> 128 on patches
    tower = 4 * 2 * 17 * (4 * 64 * 64 + 2 * 64 * 96)
    assert linear == tower + 2 * 16 * (64 * 128 + 128 * 128)


def test_what_a_loss_does_not_reach_is_named() -> None:
    assert analyse(LLAMA, tokens=256).architecture.without_gradient == []
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": VISION, "image_token_index": 511}
    assert not any("language" in name for name in analyse(config, tokens=256).architecture.without_gradient)
