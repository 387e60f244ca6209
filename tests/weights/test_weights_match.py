"""Placing a checkpoint's tensors: against what transformers itself loads, with faults planted, and proven by values."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onboarding.examples import example_config
from onboarding.twin import TwinPlan, build, derive
from onboarding.weights import prove
from onboarding.weights.index import INDEX, Checkpoint, Entry, pattern
from onboarding.weights.match import match_names, matched_weights
from onboarding.weights.report import make_report, words
from runtime.weights import Shards

MODELS = ("qwen3-30b-a3b", "llama-3.1-8b", "kimi-linear")


@cache
def plan(name: str) -> TwinPlan:
    return derive(example_config(name), layers_at_least=2, sequence_length=16)


@cache
def twin(name: str) -> Any:
    return build(plan(name), seed=1)


def published(name: str, folder: Path) -> dict[str, Entry]:
    """The twin's tensors as its class is published: written by transformers, read by their headers."""
    prove.write(twin(name), folder)
    shards = Shards(folder)
    return {n: Entry(name=n, file="model.safetensors", shape=shards.shape(n)) for n in shards.names()}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_its_place(name: str, tmp_path: Path) -> None:
    entries = published(name, tmp_path)
    model = twin(name)
    found = match_names(model, entries)
    assert (found.missing, found.extra, found.wrong_shapes) == ([], [], [])
    assert {p.target for p in found.placements} == set(model.state_dict())
    assert sorted(s for p in found.placements if p.how != "tied" for s in p.sources) == sorted(entries)


def test_experts_are_put_together_in_order(tmp_path: Path) -> None:
    found = match_names(twin("qwen3-30b-a3b"), published("qwen3-30b-a3b", tmp_path))
    fused = next(p for p in found.placements if p.target == "model.layers.0.mlp.experts.gate_up_proj")
    assert fused.how == "fused"
    assert "concatenate" in fused.rule
    base = "model.layers.0.mlp.experts"
    wanted = {f"{base}.{i}.{part}.weight" for i in range(8) for part in ("gate_proj", "up_proj")}
    assert set(fused.sources) == wanted
    order = [name for name in fused.sources if "gate_proj" in name]
    assert order == [f"{base}.{i}.gate_proj.weight" for i in range(8)]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    entries = published("qwen3-30b-a3b", tmp_path)
    del entries["model.norm.weight"]
    odd = "model.layers.0.self_attn.q_proj.weight"
    entries[odd] = dataclasses.replace(entries[odd], shape=(7, 7))
    entries["model.layers.0.mystery.weight"] = Entry(name="model.layers.0.mystery.weight", file="x.safetensors")
    entries["model.layers.0.self_attn.rotary_emb.inv_freq"] = Entry(name="inv", file="x.safetensors")
    checkpoint = Checkpoint(entries=entries, total_bytes=1)
    report, placements = make_report(checkpoint, matched_weights(twin("qwen3-30b-a3b"), entries))
    assert not report.complete
    assert report.missing == ["model.norm.weight"]
    assert set(report.extra) == {"model.layers.*.mystery.weight", "model.layers.*.self_attn.rotary_emb.inv_freq"}
    assert list(report.extra_why) == ["model.layers.*.self_attn.rotary_emb.inv_freq"]
    assert report.wrong_shapes == [f"{odd} is [7, 7], the model's {odd} [64, 64]"]
    assert report.placed == len(placements) == report.expected - 1
    assert "1 missing" in words(report)
    assert "mystery" in words(report)
    assert "inv_freq" not in words(report)


def test_an_expert_that_is_not_there_is_seen(tmp_path: Path) -> None:
    """Stacked experts of unequal numbers would load as a wrong model."""
    entries = published("qwen3-30b-a3b", tmp_path)
    del entries["model.layers.1.mlp.experts.3.up_proj.weight"]
    report, _ = make_report(Checkpoint(entries=entries, total_bytes=0), matched_weights(twin("qwen3-30b-a3b"), entries))
    assert not report.complete
    assert any("model.layers.1.mlp.experts.gate_up_proj" in text for text in report.wrong_shapes)


def test_a_missing_fused_matrix_is_explained(tmp_path: Path) -> None:
    entries = published("llama-3.1-8b", tmp_path)
    joined = {
        n.replace("gate_proj", "gate_up_proj"): Entry(name=n, file="x.safetensors")
        for n in entries
        if "up_proj" not in n
    }
    report, _ = make_report(Checkpoint(entries=joined, total_bytes=0), matched_weights(twin("llama-3.1-8b"), joined))
    assert any("could hold gate_proj and up_proj" in hint for hint in report.hints)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fp8", [False, True])
def test_every_value_comes_back(name: str, fp8: bool) -> None:
    names = sorted({pattern(n) for n in twin(name).state_dict()})
    text = prove.prove_loading({}, plan=dataclasses.asdict(plan(name)), published=names, fp8=fp8)
    assert text.startswith(f"all {len(twin(name).state_dict())} tensors")


def test_a_swapped_pair_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If gate and up came back exchanged the proof would say so."""
    write = prove.write

    def swapped(model: Any, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        write(model, folder)
        paths = sorted(folder.glob("*.safetensors"))
        tensors = {name: value for path in paths for name, value in load_file(path).items()}
        gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
        for path in (*paths, folder / INDEX):
            path.unlink()
        save_file({**tensors, gate: tensors[up], up: tensors[gate]}, paths[0])

    monkeypatch.setattr(prove, "write", swapped)
    text = prove.proven_or_why({}, plan=dataclasses.asdict(plan("llama-3.1-8b")), published=[], fp8=False)
    assert "did not come back" in text


def test_fp8_blocks_are_values_times_scales() -> None:
    value = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    narrow, scales = prove.to_blocks(value)
    assert scales.shape == (2, 2)
    wide: Tensor = narrow.float() * scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    # e4m3: three mantissa bits, at most 2^-4 off; below 2^-6 of the block's scale the grid is even
    assert float(((wide - value).abs() / value.abs().clamp_min(float(scales.max()) * 2**-6)).max()) <= 2**-4 + 1e-6
