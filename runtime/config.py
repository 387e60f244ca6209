"""What one training run is: a single frozen value, read from YAML or returned whole by a function.

Everything that can be checked without a device is checked when the value is made. Free of torch.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from runtime.lora.config import LoraConfig
from runtime.parallel.config import ParallelConfig
from runtime.refusal import Refused
from runtime.schema import from_plain, to_plain

DType = Literal["float64", "float32", "bfloat16"]
RULES = ("nan", "stall", "throughput-drop", "imbalance", "memory-slope")


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}: it must be above zero and finite")


def _not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}: it must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, with which values, in which precision."""

    definition: str
    """Folder with ``config.json`` and, where the model has one, its tokenizer."""
    weights: str | None = None
    """Folder of safetensors with the model's values; None draws initial values from ``seed``."""
    bundle: str | None = None
    """Folder of a bundle whose kernels are put in by its own ``apply.py``; None trains the model's own code."""
    trusted_key: str | None = None
    """Public key (hex) that must have signed the bundle; None accepts the user's trusted keys."""
    unproven_kernels: bool = False
    """Run a bundle's kernels on a GPU that their verdicts do not cover."""
    dtype: DType = "bfloat16"
    """Of parameters and computation; parameters that the model's class keeps in float32 stay float32."""
    attention: str = "sdpa"
    """transformers' attention implementation."""
    experts: str | None = None
    """transformers' experts implementation; None takes ``grouped_mm`` on a GPU and ``eager`` on a CPU."""
    towers: Literal["frozen", "trained"] = "frozen"
    """Vision and audio towers of a multimodal model, when all parameters are trained."""
    seed: int = 0
    """Of initial values: the model's where there are no weights, the adapters'."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it becomes sequences."""

    files: tuple[str, ...]
    """Paths, globs or fsspec addresses of JSONL, Parquet or text files; order does not matter, they are sorted."""
    format: Literal["auto", "jsonl", "parquet", "text"] = "auto"
    """``auto`` goes by the names' endings."""
    text_field: str = "text"
    """Field of plain documents."""
    messages_field: str = "messages"
    """Field of conversations: lists of ``{"role", "content"}``; a record that has it is a conversation."""
    prompt_fields: tuple[str, str] = ("prompt", "completion")
    """Fields of records that are one question and one answer."""
    train_on: Literal["answers", "everything"] = "answers"
    """Whether the loss of a conversation counts what the assistant says, or every token."""
    tokenizer: Literal["model", "bytes"] = "model"
    """The definition's tokenizer, or one token a byte (for twins, whose vocabulary holds the 256 bytes)."""
    chat_template: str | None = None
    """File with a Jinja template that replaces the tokenizer's; None takes the tokenizer's own."""
    sequence_length: int = 2048
    """Tokens in a row."""
    packing: Literal["cut", "whole", "none"] = "whole"
    """``cut`` fills rows to the end and cuts documents, ``whole`` puts as many whole documents as fit into a row,
    ``none`` one. A document longer than a row is cut in every case, and attention never crosses documents."""
    shuffle: bool = True
    """Another order in every epoch; the same seed gives the same orders."""
    shuffle_block: int = 1
    """Records that stay together when the order is shuffled: 1 for local files, thousands for remote ones."""
    seed: int = 0
    """Of the order."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files is empty: name at least one file")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}: a next token needs two")
        _positive(self, "shuffle_block")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How the weights move."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` takes the matrices of blocks; everything else stays with AdamW."""
    lr: float = 1e-4
    """Peak learning rate."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.0
    """Decoupled; matrices only."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """From the end of the warm-up to the last step."""
    final_lr: float = 0.1
    """Share of ``lr`` that the schedule ends at."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps")
        _not_negative(self, "weight_decay", "warmup_steps", "final_lr")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas are {self.betas}: two numbers in [0, 1) are wanted")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One optimizer step."""

    batch: int = 8
    """Sequences of one step over all ranks: the data order depends on it and not on the number of ranks."""
    microbatch: int = 1
    """Sequences that one rank runs at a time; the rest of its share is accumulated."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them."""
    bad_steps: int = 3
    """Steps in a row that may be skipped for a loss or gradient that is not finite, or for a spike."""
    spike: float = 0.0
    """Skip a step whose gradient norm is above this multiple of its running mean; 0 skips none."""
    deterministic: bool = False
    """Only deterministic algorithms: the same run gives the same bits, a little slower on a GPU."""

    def __post_init__(self) -> None:
        _positive(self, "batch", "microbatch")
        _not_negative(self, "max_norm", "bad_steps", "spike")
        if self.spike and self.spike <= 1:
            raise ValueError(f"spike is {self.spike}: a multiple above 1 of the running mean is wanted")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is kept, recomputed or moved away."""

    recompute: Literal["none", "block", "swap_cache"] = "block"
    """Keep every activation, recompute each block in backward, or recompute what ``swap_cache`` could not keep."""
    cache_device_gib: float = 4.0
    """``swap_cache``: device memory for kept results."""
    cache_host_gib: float = 16.0
    """``swap_cache``: pinned host memory for results that do not fit on the device."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at one time; 0 makes them all at once."""
    offload_optimizer: bool = False
    """Optimizer state lives in host memory and visits the device tensor by tensor."""
    device_gib: float = 0.0
    """Device memory that the plan must fit; 0 takes what the device has."""

    def __post_init__(self) -> None:
        _not_negative(self, "cache_device_gib", "cache_host_gib", "loss_chunk", "device_gib")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and where the run is saved."""

    every: int = 100
    """Steps between checkpoints; 0 saves at the end (and on SIGTERM) only."""
    keep: int = 2
    """Newest checkpoints that stay."""
    asynchronous: bool = True
    """Write behind the next steps; a copy in host memory is taken first."""
    upload: str | None = None
    """fsspec address (``s3://bucket/run``) that every checkpoint is copied to."""

    def __post_init__(self) -> None:
        _not_negative(self, "every")
        _positive(self, "keep")


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """One condition that a person should hear of."""

    rule: Literal["nan", "stall", "throughput-drop", "imbalance", "memory-slope"]
    """``nan``: loss or norm not finite; ``stall``: seconds in one step; ``throughput-drop``: share below the median of
    the window; ``imbalance``: largest over mean expert load; ``memory-slope``: growth in MiB a step over the window."""
    limit: float = 0.0
    """Where it fires; ``nan`` needs none."""
    window: int = 20
    """Steps looked back at."""
    action: Literal["log", "stop"] = "log"
    """Whether the run goes on."""

    def __post_init__(self) -> None:
        _positive(self, "window")
        if self.rule != "nan":
            _positive(self, "limit")


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is measured, and where it goes. ``metrics.jsonl`` in the output folder is always written."""

    every: int = 1
    """Steps between records."""
    prometheus_file: str | None = None
    """Text file for the node exporter's collector."""
    prometheus_port: int = 0
    """Port of an endpoint on 127.0.0.1 (first rank); 0 opens none."""
    profile_step: int = 0
    """Step whose collectives are timed by the profiler (that step is slower); 0 profiles none."""
    tensorboard: bool = True
    """Event files under ``tensorboard/`` of the output folder."""
    peak_tflops: float = 0.0
    """Of one device, for MFU; 0 takes the table's figure, and no MFU where the table has none."""
    alerts: tuple[AlertRule, ...] = (AlertRule(rule="nan"), AlertRule(rule="stall", limit=600.0))
    """Rules, each judged after every step."""

    def __post_init__(self) -> None:
        _positive(self, "every")
        _not_negative(self, "prometheus_port", "peak_tflops", "profile_step")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What happens when a rank hangs or is told to stop."""

    hang_s: float = 900.0
    """Seconds without progress after which every thread's stack is written and the rank ends; 0 waits for ever."""
    heartbeat_s: float = 5.0
    """Seconds between heartbeats (a file a rank under ``heartbeats/``)."""

    def __post_init__(self) -> None:
        _not_negative(self, "hang_s")
        _positive(self, "heartbeat_s")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    output: str
    """Folder of the run: checkpoints, metrics, and in the end ``adapter/`` or ``model/``."""
    steps: int
    """Optimizer steps."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes the GPU where there is one."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks share the work."""
    lora: LoraConfig | None = None
    """Adapters; None trains all parameters."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    step: StepConfig = field(default_factory=StepConfig)
    """One step."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Measurements and alerts."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Hangs and signals."""

    def __post_init__(self) -> None:
        _positive(self, "steps")
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but there are {self.steps} steps"
            )

    def microsteps(self, world_size: int) -> int:
        """Forward and backward passes of one rank in one step.

        Raises:
            Refused: ``batch-not-divisible``.
        """
        share = world_size * self.step.microbatch
        if self.step.batch % share:
            raise Refused(
                "batch-not-divisible",
                f"batch {self.step.batch} is no multiple of {world_size} ranks x microbatch {self.step.microbatch}",
                f"set step.batch to {-(-self.step.batch // share) * share}, or change step.microbatch",
            )
        return self.step.batch // share

    @property
    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint of one run to be gone on with in another: model, adapters, data order."""
        plain = to_plain(self)
        lora = plain["lora"]
        order = {k: plain["data"][k] for k in ("sequence_length", "packing", "shuffle", "shuffle_block", "seed")}
        return {"lora": lora, "optimizer": plain["optimizer"]["name"], "batch": self.step.batch, "data": order}


def load(source: str | Path) -> RunConfig:
    """Read a run from a YAML file, or call the function named ``package.module:function``.

    Raises:
        Refused: no such file, not YAML, a field unknown or out of range.
    """
    text = str(source)
    if ":" in text and not Path(text).exists() and text.partition(":")[0].replace(".", "").isidentifier():
        module, _, name = text.partition(":")
        made = getattr(importlib.import_module(module), name)()
        if not isinstance(made, RunConfig):
            raise Refused("config-field", f"{text} returned {type(made).__name__}", "a RunConfig is wanted")
        return made
    try:
        data = yaml.safe_load(Path(source).read_text())
    except OSError as error:
        raise Refused("config-missing", f"cannot read {source}", error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        raise Refused("config-not-yaml", f"{source} is not YAML", str(error)) from None
    return from_plain(RunConfig, data)


def dump(config: RunConfig) -> str:
    """The run as YAML; :func:`load` reads it back."""
    return yaml.safe_dump(to_plain(config), sort_keys=False)


def digest(data: Mapping[str, Any]) -> str:
    """sha256 of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
