"""One record a step, out of what the step, the clock, the device and the experts say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from runtime.config import RunConfig
from runtime.experts.balance import LoadReport
from runtime.memory.budget import measured
from runtime.memory.swap_cache import SwapCache
from runtime.parallel.state import state_of
from runtime.step import StepResult
from runtime.telemetry.alerts import Alert, Alerts
from runtime.telemetry.flops import Flops, peak_tflops
from runtime.telemetry.sinks import JsonLines, Prometheus, Sink, TensorBoard


class Telemetry:
    """Of one rank; only the first writes.

    Args:
        config: of the run.
        output: its folder.
        device: of this rank.
        world_size: ranks.
        flops: of one token.
        first: whether this rank writes.
    """

    def __init__(
        self, config: RunConfig, output: Path, device: torch.device, world_size: int, flops: Flops, *, first: bool
    ) -> None:
        self.config, self.device, self.world_size, self.flops = config, device, world_size, flops
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = config.telemetry.peak_tflops or peak_tflops(name)
        self._alerts = Alerts(config.telemetry.alerts)
        self._sinks: list[Sink] = []
        self._bytes = 0
        self._begun = time.perf_counter()
        if not first:
            return
        chosen = config.telemetry
        self._sinks.append(JsonLines(output / "metrics.jsonl"))
        if chosen.prometheus_file or chosen.prometheus_port:
            file = Path(chosen.prometheus_file) if chosen.prometheus_file else None
            self._sinks.append(Prometheus(file, chosen.prometheus_port, {"run": output.name}))
        if chosen.tensorboard:
            self._sinks.append(TensorBoard(output / "tensorboard"))

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def record(
        self, step: int, result: StepResult, rate: float, model: torch.nn.Module, cache: SwapCache | None
    ) -> tuple[dict[str, Any], list[Alert]]:
        """Measure, write and judge one step.

        Returns:
            The record, and the alerts it raised.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self._begun
        memory = measured(self.device)
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "seconds": seconds,
            "tokens": result.tokens,
            "counted_tokens": result.counted,
            "tokens_per_second": result.tokens / seconds,
            "tflops_per_device": self.flops.training * result.tokens / seconds / self.world_size / 1e12,
            "device_bytes": memory["device"],
            "host_bytes": memory["host"],
            "skipped": result.skipped,
        }
        if self.peak:
            record["mfu"] = record["tflops_per_device"] / self.peak
        sent = _sent(model)
        if sent:
            record["all_to_all_bytes"] = sent - self._bytes
            self._bytes = sent
        if result.load is not None:
            record["experts"] = experts(result.load)
        if cache is not None:
            counts = cache.counts
            record["cache"] = {k: getattr(counts, k).total() for k in ("hits", "promoted", "misses", "dropped")}
        if step % self.config.telemetry.every == 0 or step == self.config.steps:
            for sink in self._sinks:
                sink.write(record)
        return record, self._alerts.judge(record)

    def close(self) -> None:
        """End every sink."""
        for sink in self._sinks:
            sink.close()


def experts(load: LoadReport) -> dict[str, Any]:
    """Load of the experts in numbers: the worst layer's imbalance, slots lost, and the histogram of every layer."""
    busiest = (load.violation() + 1).max().item() if load.load.numel() else 0.0
    return {
        "imbalance": busiest,
        "idle": int((load.load == 0).sum()),
        "dropped": int(load.dropped.sum()),
        "rerouted": int(load.rerouted.sum()),
        "load": [[int(n) for n in layer] for layer in load.load.tolist()],
    }


def _sent(model: torch.nn.Module) -> int:
    """Bytes that all-to-all has sent to other ranks so far."""
    transports = [layer.transport for layer in state_of(model).layers if layer.transport is not None]
    return sum(sum(transport.traffic.bytes) for transport in transports)
