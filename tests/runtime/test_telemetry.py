"""FLOPs against published figures, sinks against their readers, alert rules one by one."""

from __future__ import annotations

import json
import struct
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from runtime_models import definition

from runtime.config import AlertRule, ModelConfig
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.model import build, read_definition
from runtime.telemetry.alerts import Alerts
from runtime.telemetry.communication import seconds
from runtime.telemetry.flops import count, peak_tflops
from runtime.telemetry.sinks import JsonLines, Prometheus, TensorBoard

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
LLAMA_405B = {
    **LLAMA_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


def on_meta(folder: Path) -> Any:
    choice = ModelConfig(definition=str(folder))
    return build(read_definition(folder), choice, "cpu", storage=torch.bfloat16)


# published TFLOP of training a token: NVIDIA's performance summaries of Megatron-Bridge, derived from its tables
@pytest.mark.parametrize(
    ("source", "length", "published"),
    [
        ("qwen3-30b-a3b", 4096, 0.0231),
        ("deepseek-v3", 4096, 0.249),
        (LLAMA_70B, 8192, 0.449),
        (LLAMA_70B, 4096, 0.433),
        pytest.param(LLAMA_405B, 8192, 2.52, marks=pytest.mark.slow),
    ],
    ids=["qwen3-30b-a3b", "deepseek-v3", "llama3-70b-8k", "llama3-70b-4k", "llama3.1-405b"],
)
def test_flops_of_a_token_are_the_published_ones(tmp_path: Path, source: Any, length: int, published: float) -> None:
    folder = EXAMPLES / source if isinstance(source, str) else tmp_path
    if not isinstance(source, str):
        (folder / "config.json").write_text(json.dumps(source))
    assert count(on_meta(folder), length).training / 1e12 == pytest.approx(published, rel=0.02)


def test_adapters_cost_the_published_share_of_full_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    model = on_meta(tmp_path)
    full = count(model, 4096).training
    apply_lora(model, LoraConfig(r=16, targets=("linear",)))
    assert count(model, 4096).training / full == pytest.approx(0.278 / 0.433, rel=0.07)


def test_every_layer_kind_is_counted_by_hand(tmp_path: Path) -> None:
    model = on_meta(definition(tmp_path, "qwen3-next"))
    flops = count(model, 9)
    linear, full = flops.by_kind["linear attention + experts"], flops.by_kind["attention + experts"]
    block = 2 * 64 * 8 + 2 * 3 * 64 * 32 * 2 + 2 * 3 * 64 * 32 + 2 * 64  # router, 2 of 8 experts, shared, its gate
    # queries with gates, keys, values, out; 4 heads of 16 see (9 + 1) / 2 tokens
    attention = 2 * (64 * 128 + 2 * 64 * 32 + 64 * 64) + 2 * 5 * 4 * 32
    assert full == 2 * (block + attention)
    # qkvz, ba, out, convolution of 4 taps over 96 channels; two states of 16 x 16
    delta = 2 * (64 * 128 + 64 * 4 + 32 * 64 + 96 * 4) + 4 * 2 * 16 * 16
    assert linear == 2 * (block + delta)
    assert flops.by_kind["head"] == 2 * 64 * 320


def test_a_window_costs_what_it_sees(tmp_path: Path) -> None:
    plain = count(on_meta(definition(tmp_path / "a", "llama")), 32).by_kind
    changes = {"model_type": "mistral", "sliding_window": 4}
    windowed = count(on_meta(definition(tmp_path / "b", "llama", **changes)), 32).by_kind
    seen = sum(min(i + 1, 4) for i in range(32)) / 32
    per_token = 2 * 4 * 32 * 2  # 2 (d_query + d_value) of 4 heads, two layers
    assert plain["attention"] - windowed["window attention"] == pytest.approx(per_token * (16.5 - seen))


def test_peaks_are_found_by_name() -> None:
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("GeForce 256") == 0.0


# ---- communication ----------------------------------------------------------------------------------------------


def test_exposed_communication_is_what_no_kernel_covers() -> None:
    def event(name: str, begin: float, end: float, where: str = "DeviceType.CUDA") -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=begin, end=end), device_type=where)

    events = [
        event("ncclDevKernel_AllGather", 0, 10),
        event("ncclDevKernel_SendRecv", 8, 20),  # together 0 to 20
        event("nccl:all_gather", 0, 500, "DeviceType.CPU"),  # the launch, not the work
        event("gemm", 5, 9),
        event("gemm", 15, 30),  # covers 5 to 9 and 15 to 20
    ]
    found = seconds(events, "cuda")
    assert found == pytest.approx({"communication": 20e-6, "exposed_communication": 11e-6, "computation": 19e-6})
    cpu = [event("gloo:all_reduce", 0, 4, "DeviceType.CPU"), event("aten::mm", 0, 9, "DeviceType.CPU")]
    assert seconds(cpu, "cpu") == pytest.approx({"communication": 4e-6})
    assert seconds([], "cuda") == {"communication": 0, "exposed_communication": 0, "computation": 0}


# ---- sinks ------------------------------------------------------------------------------------------------------

RECORD = {"step": 7, "loss": 1.5, "skipped": "", "experts": {"imbalance": 2.25, "load": [[1, 2]]}, "odd": float("nan")}


def test_jsonl_appends_one_object_a_line(tmp_path: Path) -> None:
    for _ in range(2):
        sink = JsonLines(tmp_path / "deep" / "m.jsonl")
        sink.write({"step": 1})
        sink.close()
    assert [json.loads(x) for x in (tmp_path / "deep" / "m.jsonl").read_text().splitlines()] == [{"step": 1}] * 2


def test_prometheus_text_is_read_by_its_own_parser_from_file_and_endpoint(tmp_path: Path) -> None:
    sink = Prometheus(tmp_path / "run.prom", -1, {"run": 'a "b"\\c'})
    sink.write(RECORD)
    served = urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read().decode()
    sink.close()
    assert served == (tmp_path / "run.prom").read_text()
    samples = {s.name: s for f in text_string_to_metric_families(served) for s in f.samples}
    assert samples["onboard_run_loss"].value == 1.5
    assert samples["onboard_run_experts_imbalance"].value == 2.25
    assert samples["onboard_run_loss"].labels == {"run": 'a "b"\\c'}
    assert samples["onboard_run_odd"].value != samples["onboard_run_odd"].value
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoard(tmp_path)
    for step in (1, 300):
        sink.write({"step": step, "loss": 1.5 / step, "note": "text is left out"})
    sink.close()
    events = list(EventFileLoader(str(next(tmp_path.iterdir()))).Load())
    assert events[0].file_version == "brain.Event:2"
    values = [(e.step, v.tag, v.tensor.float_val[0]) for e in events for v in e.summary.value]
    assert values == [(1, "loss", 1.5), (300, "loss", struct.unpack("f", struct.pack("f", 0.005))[0])]


# ---- alerts -----------------------------------------------------------------------------------------------------


def fired(rule: AlertRule, records: list[dict[str, Any]]) -> list[int]:
    alerts = Alerts([rule])
    base = {"loss": 1.0, "grad_norm": 1.0, "seconds": 1.0, "tokens_per_second": 100.0, "device_bytes": 0}
    return [a.step for i, r in enumerate(records, 1) for a in alerts.judge({**base, **r, "step": i})]


def test_each_rule_fires_where_it_should_and_once_in_a_row() -> None:
    nan = {"loss": float("nan")}
    assert fired(AlertRule(rule="nan"), [{}, nan, nan, {}, {"grad_norm": float("inf")}]) == [2, 5]
    assert fired(AlertRule(rule="stall", limit=10), [{}, {"seconds": 10.5}, {"seconds": 9}]) == [2]
    slow = {"tokens_per_second": 60.0}
    assert fired(AlertRule(rule="throughput-drop", limit=0.3, window=4), [slow, {}, {}, {}, {}, slow, {}]) == [6]
    busy = {"experts": {"imbalance": 4.5}}
    assert fired(AlertRule(rule="imbalance", limit=4), [{}, busy, busy, {}]) == [2]
    growing = [{"device_bytes": i * (3 << 20)} for i in range(8)]
    assert fired(AlertRule(rule="memory-slope", limit=2.9, window=5), growing) == [6]
    assert fired(AlertRule(rule="memory-slope", limit=3.1, window=5), growing) == []


def test_an_alert_says_whether_to_stop() -> None:
    (alert,) = Alerts([AlertRule(rule="nan", action="stop")]).judge({"step": 3, "loss": float("inf"), "grad_norm": 1.0})
    assert alert.stop
    assert alert.words == "loss not finite"
