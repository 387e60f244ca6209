"""Whole runs in this process: loss falls, a run goes on bit for bit, and what is wrong is refused or survived."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_models import definition, text_file
from safetensors.torch import load_file

from runtime.checkpoint import folder, remote
from runtime.config import (
    AlertRule,
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StepConfig,
    TelemetryConfig,
)
from runtime.lora.config import LoraConfig
from runtime.parallel.config import ParallelConfig
from runtime.refusal import Refused
from runtime.step import Health, hash_of
from runtime.train import run
from runtime.voice import Voice


def a_run(tmp_path: Path, name: str = "llama", **changes: Any) -> RunConfig:
    where = definition(tmp_path / name, name)
    data = text_file(tmp_path / "data.jsonl")
    config = RunConfig(
        output=str(tmp_path / "run"),
        steps=6,
        model=ModelConfig(definition=str(where), dtype="float32"),
        data=DataConfig(files=(str(data),), tokenizer="bytes", sequence_length=48),
        step=StepConfig(batch=4, microbatch=2),
        optimizer=OptimizerConfig(lr=3e-3),
        checkpoint=CheckpointConfig(every=2),
        device="cpu",
    )
    return replace(config, **changes)


class Heard(Voice):
    """Keeps what is said; ``on`` reacts to it."""

    def __init__(self, on: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(first=True, events=True, stream=io.StringIO())
        self.all: list[dict[str, Any]] = []
        self._on = on

    def say(self, kind: str, **data: Any) -> None:
        json.dumps(data)  # what is said must be plain
        self.all.append({"kind": kind, **data})
        if self._on is not None:
            self._on(self.all[-1])

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.all if e["kind"] == kind]


def trained(config: RunConfig, on: Callable[[dict[str, Any]], None] | None = None) -> tuple[int, Heard]:
    heard = Heard(on)
    try:
        return run(config, heard), heard
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def losses(heard: Heard) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in heard.of("step")}


def model_of(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output) / "model" / "model-00001.safetensors")


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    def on(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on


# ---- training ---------------------------------------------------------------------------------------------------


def test_loss_falls_and_everything_is_left_behind(tmp_path: Path) -> None:
    config = a_run(tmp_path, steps=10)
    status, heard = trained(config)
    assert status == 0
    found = losses(heard)
    assert found[1] == pytest.approx(math.log(320), rel=0.02)  # initial logits are near zero
    assert found[10] < found[1] - 1
    output = Path(config.output)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 11))
    assert all(r["tokens"] <= 4 * 48 and r["counted_tokens"] < r["tokens"] for r in records)
    assert folder.steps(output / "checkpoints") == [8, 10]
    assert list((output / "tensorboard").iterdir())
    assert json.loads((output / "heartbeats" / "rank-0.json").read_text())["doing"] == "ended"
    assert heard.of("budget")[0]["device"]["parts"]["weights"] == 102720 * 4
    assert heard.of("result")[0]["path"] == str(output / "model")


def test_how_a_batch_is_cut_into_micro_batches_changes_nothing(tmp_path: Path) -> None:
    """Token-weighted: rows of different fill must not weigh by row (1 x 4 against 4 x 1)."""
    found = []
    for micro in (1, 4):
        config = a_run(
            tmp_path,
            output=str(tmp_path / f"run{micro}"),
            step=StepConfig(batch=4, microbatch=micro),
            model=ModelConfig(definition=str(tmp_path / "qwen3-moe"), dtype="float64"),
            steps=3,
        )
        definition(tmp_path / "qwen3-moe", "qwen3-moe")
        found.append(losses(trained(config)[1]))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_written_that_peft_loads_with_the_loss_that_was_reached(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path / "llama"
    definition(base, "llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    config = a_run(
        tmp_path,
        model=ModelConfig(definition=str(base), weights=str(base), dtype="float32"),
        lora=LoraConfig(r=4, targets=("linear",)),
        steps=8,
        optimizer=OptimizerConfig(lr=2e-2),
    )
    status, heard = trained(config)
    assert status == 0
    adapter = Path(heard.of("result")[0]["path"])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    text = [json.loads(line)["text"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    rows = [torch.tensor([[*t.encode(), 257]]) for t in text]

    def mean_loss(model: Any) -> float:
        with torch.no_grad():
            pairs = [(model(input_ids=r, labels=r).loss.item(), r.shape[1] - 1) for r in rows]
        return float(sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs))

    before = mean_loss(plain)
    after = mean_loss(PeftModel.from_pretrained(plain, adapter))
    assert heard.of("step")[0]["loss"] == pytest.approx(before, rel=0.02)
    assert after <= heard.of("step")[-1]["loss"] + 0.1
    assert after < before - 0.3


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(MemoryConfig(recompute="none", loss_chunk=0), id="keep-all", marks=pytest.mark.slow),
        pytest.param(
            MemoryConfig(recompute="swap_cache", cache_device_gib=0.0002, cache_host_gib=0.0002, loss_chunk=7),
            id="swap-cache",
        ),
        pytest.param(MemoryConfig(offload_optimizer=True), id="offload", marks=pytest.mark.slow),
    ],
)
def test_saving_memory_does_not_change_the_run(tmp_path: Path, memory: MemoryConfig) -> None:
    where = definition(tmp_path / "qwen3-moe", "qwen3-moe")
    model = ModelConfig(definition=str(where), dtype="float64")
    plain = losses(trained(a_run(tmp_path, model=model, steps=3, output=str(tmp_path / "a")))[1])
    saving = losses(trained(a_run(tmp_path, model=model, steps=3, output=str(tmp_path / "b"), memory=memory))[1])
    assert saving == pytest.approx(plain, rel=1e-10)


@pytest.mark.slow
def test_muon_trains_the_matrices_of_blocks(tmp_path: Path) -> None:
    config = a_run(tmp_path, optimizer=OptimizerConfig(name="muon", lr=1e-2), steps=4)
    status, heard = trained(config)
    assert status == 0
    found = losses(heard)
    assert found[4] < found[1]


# ---- going on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    """In the middle of an epoch, with dropout: data, weights, optimizer and random draws are all taken up."""
    checkpoint = CheckpointConfig(every=2, asynchronous=asynchronous)
    where = definition(tmp_path / "d", "llama", attention_dropout=0.1)
    model = ModelConfig(definition=str(where), dtype="float32", attention="eager")
    whole = a_run(tmp_path, checkpoint=checkpoint, model=model, output=str(tmp_path / "whole"))
    _, unbroken = trained(whole)
    parts = replace(whole, output=str(tmp_path / "parts"))
    status, first = trained(parts, stop_at(3))
    assert status == 0
    assert first.of("stopped")[0]["step"] == 4  # agreed on at the end of the next step
    status, second = trained(parts)
    assert status == 0
    assert second.of("resumed")[0]["step"] == 4
    assert {**losses(first), **losses(second)} == losses(unbroken)
    ours, theirs = model_of(parts), model_of(whole)
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


def test_a_finished_run_only_writes_its_result_again(tmp_path: Path) -> None:
    config = a_run(tmp_path, steps=2)
    trained(config)
    status, heard = trained(config)
    assert status == 0
    assert heard.of("step") == []
    assert heard.of("result")


def test_checkpoints_go_to_an_object_store_and_come_back(tmp_path: Path) -> None:
    address = "memory://bucket/run"
    config = a_run(tmp_path, checkpoint=CheckpointConfig(every=1, keep=2, upload=address), steps=4)
    _, unbroken = trained(config)
    assert len(unbroken.of("upload")) == 4
    assert remote.steps(address) == [3, 4]
    elsewhere = replace(config, output=str(tmp_path / "elsewhere"), steps=5)
    status, heard = trained(elsewhere)
    assert status == 0
    assert heard.of("download")[0]["step"] == 4
    assert heard.of("resumed")[0]["step"] == 4
    assert list(losses(heard)) == [5]


# ---- faults -----------------------------------------------------------------------------------------------------


def shard_of(config: RunConfig, step: int) -> Path:
    return folder.path_of(Path(config.output) / "checkpoints", step) / "__0_0.distcp"


def test_a_damaged_checkpoint_is_found_by_its_digest_and_the_one_before_is_taken(tmp_path: Path) -> None:
    config = a_run(tmp_path, steps=4)
    trained(config, stop_at(3))
    content = bytearray(shard_of(config, 4).read_bytes())
    content[len(content) // 2] ^= 1
    shard_of(config, 4).write_bytes(content)
    status, heard = trained(config)
    assert status == 0
    assert heard.of("checkpoint-corrupt")[0]["why"] == "__0_0.distcp has another sha256 than when it was written"
    assert heard.of("resumed")[0]["step"] == 2
    assert list(losses(heard)) == [3, 4]


def test_damage_everywhere_is_refused_with_names(tmp_path: Path) -> None:
    config = a_run(tmp_path, steps=4)
    trained(config)
    shard_of(config, 2).unlink()
    shard_of(config, 4).write_bytes(b"short")
    with pytest.raises(
        Refused, match=r"step-00000004: __0_0.distcp has 5 bytes .* step-00000002: __0_0.distcp is miss"
    ):
        trained(config)


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystem

    config = a_run(tmp_path, steps=6)
    real = FileSystem.create_stream

    def full(self: Any, path: Any, mode: str) -> Any:
        if "step-00000004" in str(path) and "w" in mode:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    status, heard = trained(config)
    assert status == 0
    assert "No space left on device" in heard.of("checkpoint-failed")[0]["why"]
    assert folder.steps(Path(config.output) / "checkpoints") == [2, 6]
    assert not list((Path(config.output) / "checkpoints").glob("*.partial"))


def test_a_stop_that_cannot_be_saved_is_not_called_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "commit", full)
    with pytest.raises(Refused, match=r"could not be saved.*No space left"):
        trained(a_run(tmp_path, steps=3), stop_at(1))


def test_what_was_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    config = a_run(tmp_path, steps=2)
    half = Path(config.output) / "checkpoints" / "step-00000001.partial"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"torn")
    status, heard = trained(config)
    assert status == 0
    assert heard.of("resumed") == []
    assert not half.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": LoraConfig(r=4, targets=("linear",))}, "lora was None"),
        ({"step": StepConfig(batch=8)}, "batch was 4 and is 8"),
        ({"model": "qwen3-tied"}, "model.type was 'llama' and is 'qwen3'"),
        ({"data": "other"}, "records was 60 and is 7"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_before_a_device_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    config = a_run(tmp_path, steps=2)
    trained(config)
    if changes.get("model"):
        where = definition(tmp_path / "other", changes["model"])
        changes = {"model": ModelConfig(definition=str(where), dtype="float32")}
    if changes.get("data"):
        changes = {"data": replace(config.data, files=(str(text_file(tmp_path / "few.jsonl", 7)),))}
    monkeypatch.setattr("runtime.train.start", untouched)
    with pytest.raises(Refused, match=words) as refused:
        trained(replace(config, **changes))
    assert refused.value.kind == "checkpoint-of-another-run"


def untouched(world: Any) -> Any:
    raise AssertionError("a device was touched")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"data": DataConfig(files=("absent.jsonl",))}, "data-missing"),
        ({"model": ModelConfig(definition="absent")}, "definition-missing"),
        ({"lora": LoraConfig(targets=("w_nothing",))}, "plan-impossible"),
        ({"lora": LoraConfig(targets=("gmm",))}, "plan-impossible"),
        ({"parallel": ParallelConfig(ep=2)}, "plan-impossible"),
        ({"step": StepConfig(batch=3, microbatch=2)}, "batch-not-divisible"),
        ({"weights": "absent"}, "weights-missing"),
        ({"bundle": "absent"}, "bundle-missing"),
        ({"tokenizer": "model"}, "tokenizer-missing"),
        ({"device": "cuda"}, "no-device"),
    ],
)
def test_bad_input_is_refused_with_the_fix_before_a_device_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kind: str
) -> None:
    monkeypatch.setattr("runtime.train.start", untouched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = a_run(tmp_path)
    for name in ("weights", "bundle"):
        if name in changes:
            elsewhere: dict[str, Any] = {name: str(tmp_path / changes[name])}
            changes = {"model": replace(config.model, **elsewhere)}
    if "tokenizer" in changes:
        changes = {"data": replace(config.data, tokenizer="model")}
    with pytest.raises(Refused) as refused:
        trained(replace(config, **changes))
    assert refused.value.kind == kind
    assert refused.value.detail


def test_steps_that_are_not_finite_move_nothing_and_too_many_end_the_run(tmp_path: Path) -> None:
    config = a_run(tmp_path, optimizer=OptimizerConfig(lr=1e30, schedule="constant"), steps=9)
    with pytest.raises(Refused, match="4 steps in a row moved nothing"):
        trained(config)
    records = [json.loads(x) for x in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    bad = [r["step"] for r in records if r["skipped"]]
    assert bad[-3:] == [r["step"] for r in records][-3:]


def test_an_alert_can_stop_the_run_and_what_was_reached_is_saved(tmp_path: Path) -> None:
    alerts = (AlertRule(rule="stall", limit=1e-9, action="stop"),)
    config = a_run(tmp_path, telemetry=TelemetryConfig(alerts=alerts, tensorboard=False))
    status, heard = trained(config)
    assert status == 1
    assert heard.of("alert")[0]["rule"] == "stall"
    assert folder.steps(Path(config.output) / "checkpoints") == [1]


def test_spikes_are_measured_by_the_running_mean_of_norms() -> None:
    health, config = Health(), StepConfig(spike=3.0, bad_steps=2)
    assert [health.verdict(1.0, 1.0, config) for _ in range(10)] == [""] * 10
    assert "more than 3 x" in health.verdict(1.0, 3.1, config)
    assert health.mean_norm == pytest.approx(1.0)  # a spike does not raise what spikes are measured by
    assert health.verdict(1.0, 2.9, config) == ""
    assert "not finite" in health.verdict(math.nan, 1.0, config)
    assert health.bad_in_a_row == 1


def test_a_dry_run_touches_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.train.start", untouched)
    heard = Heard()
    assert run(a_run(tmp_path), heard, dry_run=True) == 0
    assert heard.of("budget")[0]["device"]["total"] > 0
    assert not (tmp_path / "run").exists()


def test_a_plan_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="what helps: more ranks"):
        trained(a_run(tmp_path, memory=MemoryConfig(device_gib=0.0005)))


def test_seeds_of_neighbouring_steps_and_ranks_differ() -> None:
    seeds = {hash_of(s, step, rank) for s in range(3) for step in range(50) for rank in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert hash_of(1, 2, 3) == hash_of(1, 2, 3)
