"""The dry run of one rank against closed forms: what a rank holds, and what is sent over which groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from torch import nn

from runtime import dryrun
from runtime.dryrun import DryRun, dry_run
from runtime.leaves import leaves
from runtime.lora.config import LoraConfig
from runtime.parallel.config import ParallelConfig
from runtime.refusal import Refused

FIELDS = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
RANKS, EP, TOKENS = 4, 2, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("definition")
    (path / "config.json").write_text(json.dumps(FIELDS))
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[DryRun]:
    return [
        dry_run(folder, ranks=RANKS, parallel=ParallelConfig(ep=EP), rank=rank, tokens=TOKENS) for rank in range(RANKS)
    ]


def sent(run: DryRun, kind: str, ranks: int, phase: str) -> int:
    return sum(c.bytes for c in run.collectives if (c.kind, c.ranks, c.phase) == (kind, ranks, phase))


def test_the_ranks_together_hold_every_weight_and_state_once(ranks: list[DryRun]) -> None:
    whole = ranks[0].parameters
    assert sum(r.weight_bytes for r in ranks) == 4 * whole  # float32 where all parameters are trained
    assert sum(r.gradient_bytes for r in ranks) == 4 * whole
    states = sum(r.optimizer_bytes for r in ranks)
    assert 0 <= states - 2 * 4 * whole < 4 * RANKS * 64  # AdamW's two numbers, and its step counters


def test_gathers_carry_the_weights_in_bfloat16(ranks: list[DryRun]) -> None:
    experts = 2 * 8 * 3 * 64 * 32
    dense = ranks[0].parameters - experts
    # every rank of an ep group gathers the experts of its own quarter
    assert sent(ranks[0], "all-gather", RANKS // EP, "forward") == 2 * experts // EP
    assert sent(ranks[0], "all-gather", RANKS, "forward") == 2 * dense
    # gradients are reduced in float32
    assert sent(ranks[0], "reduce-scatter", RANKS // EP, "backward") == 4 * experts // EP
    assert sent(ranks[0], "reduce-scatter", RANKS, "backward") == 4 * dense


def test_all_to_alls_grow_with_the_tokens(folder: Path, ranks: list[DryRun]) -> None:
    more = dry_run(folder, ranks=RANKS, parallel=ParallelConfig(ep=EP), tokens=4 * TOKENS)
    for phase in ("forward", "backward"):
        assert sent(more, "all-to-all", EP, phase) == 4 * sent(ranks[0], "all-to-all", EP, phase) > 0
        assert sent(more, "all-gather", RANKS, phase) == sent(ranks[0], "all-gather", RANKS, phase)


def test_adapters_leave_only_their_own_gradients(folder: Path) -> None:
    run = dry_run(
        folder, ranks=RANKS, parallel=ParallelConfig(ep=EP), tokens=TOKENS, lora=LoraConfig(r=8, targets=("qkv",))
    )
    added = 2 * 3 * 8 * (64 + 64)
    assert run.gradient_bytes == 4 * added // RANKS
    assert run.weight_bytes < run.parameters * 2 // RANKS + 4 * added


LINEAR = {
    "model_type": "kimi_linear", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
    "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 512,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
    },
}  # fmt: skip


def test_what_kernels_serve_is_one_operator_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LINEAR))

    def run() -> DryRun:
        return dry_run(tmp_path, ranks=RANKS, parallel=ParallelConfig(ep=EP), tokens=TOKENS, lora=LoraConfig(r=4))

    met: list[int] = []

    @contextmanager
    def counted(model: nn.Module) -> Iterator[int]:
        with leaves(model) as number:
            met.append(number)
            yield number

    monkeypatch.setattr(dryrun, "leaves", counted)
    found = run()
    assert met[0] >= 2, "the scan and the causal filter"
    monkeypatch.setattr(dryrun, "leaves", nullcontext)
    whole = run()
    for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "collectives"):
        assert getattr(found, name) == getattr(whole, name), name


def test_a_layout_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="does not fit"):
        dry_run(folder, ranks=RANKS, parallel=ParallelConfig(ep=3), tokens=TOKENS)
