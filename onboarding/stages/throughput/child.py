"""The confined side of the throughput stage: trains a twin or a slice under the runtime and times it.

    python -m onboarding.stages.throughput.child JOB.json

Writes ``report.json`` into the working directory and prints a JSON line a step.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import count as count_from
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from onboarding.stages.throughput import lengths
from onboarding.stages.throughput.breakdown import BlockTimes, Clock
from onboarding.stages.throughput.cut import cut
from onboarding.twin import TwinPlan, build
from onboarding.twin.layers import decoder_layers
from runtime import weights
from runtime.config import ModelConfig, OptimizerConfig, StepConfig
from runtime.data import byte_batches, standard_library_sources
from runtime.data.stream import Rows
from runtime.experts.replay import replay_contexts
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.memory.budget import measured
from runtime.memory.loss import install_loss
from runtime.memory.recompute import recompute_blocks
from runtime.model import build as build_published
from runtime.optimizer import make_optimizers
from runtime.packing import Boundaries
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.step import Stepper
from runtime.telemetry.flops import count

LOSS_CHUNK = 1024
LEARNING_RATE = 1e-4


class Job(BaseModel):
    """What the parent asks for."""

    plan: str
    """A twin plan as JSON; empty for a slice, which is cut here for this device's memory."""
    config: dict[str, Any]
    """Published configuration, for a slice."""
    device: str
    labels: list[str]
    """Of the block kind of every layer of the published model."""
    seed: int
    batch: int
    sequence_length: int
    warm: int
    steps: int
    bundles: list[str | None]
    """One run each: folder of a trial bundle, or None for the model's own code."""
    digests: list[str]
    """Kernels of the bundle to put in."""
    adapters: bool
    code: str | None = None
    lengths: bool = False
    """Whether rows of growing length are tried, too."""


def main(arguments: list[str]) -> int:
    """Run the job file named on the command line."""
    job = Job.model_validate_json(Path(arguments[0]).read_text())
    if job.device == "cpu":
        torch.set_num_threads(1)
    if job.code is not None:
        from onboarding.custom_code.load import install

        install(Path(job.code))
    Path("report.json").write_text(json.dumps(measure(job)))
    return 0


def measure(job: Job) -> dict[str, Any]:
    """All runs of a job, as plain data."""
    device = torch.device(job.device)
    if job.plan:
        plan = TwinPlan.from_json(job.plan)
    else:
        plan = cut(job.config, memory_of(device))
    runs, failure = [], ""
    for bundle in job.bundles:
        try:
            runs.append(train(job, plan, bundle, device))
        except Exception as error:
            if bundle is None:
                raise
            # what was measured without the bundle stays worth telling
            failure = f"{type(error).__name__}: {str(error)[:300]}"
        gc.collect()  # patched forwards hold their model in a cycle
        if device.type == "cuda":
            torch.cuda.empty_cache()
    longer, reason = [], ""
    if job.lengths and device.type == "cpu":
        try:
            longer = lengths.on_cpu(
                lambda dtype: build(plan, dtype=dtype, seed=job.seed), lambda length: row(job, length)
            )
        except Exception as error:  # what was measured before stays worth telling
            reason = f"{type(error).__name__}: {str(error)[:300]}"
    elif job.lengths:
        longer = runs[-1].pop("lengths")
    return {
        "sizes": plan.sizes,
        "layers": list(plan.layers),
        "runs": runs,
        "bundle_failure": failure,
        "lengths": longer,
        "lengths_reason": reason,
    }


def row(job: Job, length: int) -> torch.Tensor:
    """Token ids of real text, int64 [1, length]."""
    return next(iter(byte_batches(standard_library_sources(), 1, length, job.seed)))


def memory_of(device: torch.device) -> int:
    """Bytes that a slice may be chosen for."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available // 4)


def train(job: Job, plan: TwinPlan, bundle: str | None, device: torch.device) -> dict[str, Any]:
    """One model from its start: warm-up, timed steps, then the middle one of three steps taken apart."""
    torch.manual_seed(job.seed)
    model = twin(plan, job, device) if job.plan else published_slice(plan, device)
    if job.adapters:
        targets = ("attention", "gmm") if any(n.endswith("experts") for n, _ in model.named_modules()) else ("linear",)
        apply_lora(model, LoraConfig(targets=targets))
    flops = count(model, job.sequence_length).training
    if not job.plan:
        recompute_blocks(model, replay_contexts)
    install_loss(model, LOSS_CHUNK)
    parallelize(model, Meshes.alone(device.type), ParallelConfig())
    applied = put_in(model, bundle, job.digests) if bundle is not None else None
    stepper = Stepper(
        model=model,
        optimizers=make_optimizers(model, OptimizerConfig(lr=LEARNING_RATE, schedule="constant"), offload=False),
        meshes=Meshes.alone(device.type),
        config=StepConfig(batch=job.batch, microbatch=job.batch),
        device=device,
        boundaries=Boundaries(),
        seed=job.seed,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock, times, losses = Clock(device), list[float](), list[float]()
    rows = batches(job)
    for number, one in enumerate(islice(rows, job.warm + job.steps), start=1):
        begin = clock.mark()
        losses.append(stepper.run(number, [one]).loss)
        end = clock.mark()
        clock.wait()
        if number > job.warm:
            times.append(clock.ms(begin, end))
        print(json.dumps({"bundle": bundle is not None, "step": number, "loss": losses[-1]}), flush=True)
    blocks = list(decoder_layers(model)[1])
    labels = [job.labels[layer] if layer < len(job.labels) else "" for layer in plan.layers]
    apart = [taken_apart(stepper, blocks, labels, clock, next(rows), job.warm + job.steps + n) for n in range(1, 4)]
    breakdown = sorted(apart, key=total)[1]
    peak = measured(device)["device"]
    longer = []
    if job.lengths and device.type == "cuda":
        numbers = count_from(job.warm + job.steps + 4)
        longer = lengths.on_gpu(
            lambda length: stepper.run(next(numbers), [rows_of(row(job, length + 1))]).loss,
            2 * job.sequence_length,
            device,
        )
    return {
        "bundle": bundle is not None,
        "lengths": longer,
        "times_ms": times,
        "losses": losses,
        "median_ms": statistics.median(times),
        "flops_per_token": flops,
        "peak_bytes": peak,
        "kernels": sum(applied.ran().values()) if applied is not None else 0,
        "breakdown": breakdown,
    }


def taken_apart(
    stepper: Stepper, blocks: list[nn.Module], labels: list[str], clock: Clock, rows: Rows, number: int
) -> list[dict[str, Any]]:
    """One more step with marks at every block."""
    with BlockTimes(blocks, clock).watching() as watched:
        stepper.passed = watched.passed
        begin = clock.mark()
        stepper.run(number, [rows])
        end = clock.mark()
    return watched.table(labels, begin, end)


def total(breakdown: list[dict[str, Any]]) -> float:
    """Milliseconds of the step that was taken apart."""
    return float(sum(row["forward_ms"] + row["backward_ms"] for row in breakdown))


def twin(plan: TwinPlan, job: Job, device: torch.device) -> nn.Module:
    """The reduced twin, in float32 on a CPU."""
    return build(plan, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, seed=job.seed).to(device)


def published_slice(plan: TwinPlan, device: torch.device) -> nn.Module:
    """The slice in bfloat16, with the initial values that its class draws on the device."""
    from onboarding.twin.models import resolve

    dtype = torch.bfloat16
    model: Any = build_published(resolve(plan.config), ModelConfig(definition=""), device.type, storage=dtype)
    weights.materialize(model, device)
    for part in (*model.modules(), *model.parameters()):
        part._is_hf_initialized = False  # construction on the meta device marked them as done
    with torch.no_grad():
        model.initialize_weights()
    return model  # type: ignore[no-any-return]  # what runtime.model builds


def put_in(model: nn.Module, bundle: str, digests: list[str]) -> Any:
    """The bundle's kernels, by its own ``apply.py``: what is timed is what is shipped."""
    sys.path.insert(0, bundle)
    return importlib.import_module("apply").apply(model, verify=False, only=digests)


def batches(job: Job) -> Iterator[Rows]:
    """Rows of real text, each one document."""
    for ids in byte_batches(standard_library_sources(), job.batch, job.sequence_length + 1, job.seed):
        yield rows_of(ids)


def rows_of(ids: torch.Tensor) -> Rows:
    """Each row of ids [B, T + 1] as one document of T tokens."""
    batch, length = ids.shape[0], ids.shape[1] - 1
    return Rows(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        positions=torch.arange(length).expand(batch, length),
        mask=torch.ones(batch, length, dtype=torch.bool),
        lengths=tuple((length,) for _ in range(batch)),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
