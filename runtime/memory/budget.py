"""Where a run's bytes go, in three tiers: device, host, disk. Made before the first step, compared with it after.

Weights, gradients and optimizer state are counted exactly from the sharded model. Activations are an estimate: what
the linear layers and attention of a block save, for one block where blocks are recomputed, else for all.
"""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from runtime.checkpoint.state import local
from runtime.config import RunConfig
from runtime.experts.sites import find_experts
from runtime.model import blocks, text_config
from runtime.refusal import Refused

GIB = 1 << 30
ROOM = 1.02
"""Of what a device has: more than this cannot fit, whatever the estimate's error."""


@dataclass(kw_only=True)
class Budget:
    """Bytes by tier and purpose, for one rank."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    available: dict[str, int] = field(default_factory=dict)
    """By tier; 0 where it is not known."""

    def total(self, tier: str) -> int:
        """Of one tier."""
        purposes: dict[str, int] = getattr(self, tier)
        return sum(purposes.values())

    def to_plain(self) -> dict[str, Any]:
        """For the log."""
        tiers = {t: {"parts": getattr(self, t), "total": self.total(t)} for t in ("device", "host", "disk")}
        return {**tiers, "available": self.available}

    def lines(self) -> list[str]:
        """As a table in text."""
        made = []
        for tier in ("device", "host", "disk"):
            has = self.available.get(tier, 0)
            of = f" of {_size(has)}" if has else ""
            parts = ", ".join(f"{name} {_size(n)}" for name, n in getattr(self, tier).items() if n)
            made.append(f"{tier:<7}{_size(self.total(tier)):>10}{of}  {parts}")
        return made


def plan(model: nn.Module, config: RunConfig, device: torch.device, output: Path, world_size: int) -> Budget:
    """The budget of one rank.

    Args:
        model: sharded, with or without memory; or whole on the meta device, as in a dry run, and then its share is
            counted.
        config: of the run.
        device: that it will run on.
        output: folder of the run, for the disk's free space.
        world_size: ranks; the disk holds what all of them write.
    """
    budget = Budget(available=available(device, output, config))
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    to_come = not any(_is_sharded(p) for p in parameters)
    shards = world_size // config.parallel.dp_replicate if to_come else 1

    def held(parameter: nn.Parameter) -> int:
        """Elements on this rank; each shard is rounded up."""
        return -(-local(parameter).numel() // shards)

    weights = sum(held(p) * p.element_size() for p in parameters)
    adapters = sum(held(p) * p.element_size() for p in trained)
    state = sum(
        held(p) * (2 * 4 if p.ndim < 2 or config.optimizer.name == "adamw" else p.element_size()) for p in trained
    )
    gathered = 0
    if world_size > 1:
        # the block that runs and the one that is fetched; of experts, this rank's own
        experts = {id(p): config.parallel.ep for site in find_experts(model) for p in site.experts.parameters()}
        whole = [
            sum(p.numel() // experts.get(id(p), 1) for p in block.parameters() if to_come or _is_sharded(p))
            for _, block in blocks(model)
        ]
        gathered = sum(sorted(whole, reverse=True)[:2]) * itemsize_of(config)
    cached = 0
    if config.memory.recompute == "swap_cache":  # never more than there is to keep
        cached = min(int(config.memory.cache_device_gib * GIB), sum(saved_by_block(model, config)))
    budget.device = {
        "weights": weights,
        "gradients": adapters,
        "optimizer": 0 if config.memory.offload_optimizer else state,
        "gathered weights": gathered,
        "activations": activations(model, config),
        "logits": logits(model, config),
        "operator cache": cached,
    }
    saved = adapters + state
    budget.host = {
        "optimizer": state if config.memory.offload_optimizer else 0,
        "operator cache": int(config.memory.cache_host_gib * GIB) if config.memory.recompute == "swap_cache" else 0,
        "checkpoint copy": saved if config.checkpoint.asynchronous else 0,
    }
    budget.disk = {"checkpoints": (config.checkpoint.keep + 1) * saved * world_size, "result": adapters * world_size}
    return budget


def refuse_too_large(budget: Budget) -> None:
    """Say no before the first step where the plan cannot fit.

    Raises:
        Refused: ``memory-plan`` with what would help.
    """
    advice = {
        "device": "more ranks, memory.recompute: block, a smaller step.microbatch or data.sequence_length, "
        "memory.loss_chunk, memory.offload_optimizer",
        "host": "a smaller memory.cache_host_gib, memory.offload_optimizer: false, checkpoint.asynchronous: false",
        "disk": "a smaller checkpoint.keep, or another output folder",
    }
    for tier, words in advice.items():
        has = budget.available.get(tier, 0)
        if has and budget.total(tier) > ROOM * has:
            title = f"the plan needs {_size(budget.total(tier))} of {tier} memory and there are {_size(has)}"
            raise Refused("memory-plan", title, f"{'; '.join(budget.lines())}; what helps: {words}")


def activations(model: nn.Module, config: RunConfig) -> int:
    """Estimate for one micro-batch of one rank."""
    tokens = config.step.microbatch * config.data.sequence_length
    per_block = saved_by_block(model, config)
    inputs = len(per_block) * int(text_config(model).hidden_size) * tokens * itemsize_of(config)
    return inputs + (sum(per_block) if config.memory.recompute == "none" else max(per_block, default=0))


def saved_by_block(model: nn.Module, config: RunConfig) -> list[int]:
    """Bytes that each block keeps for backward where nothing is recomputed, for one micro-batch of one rank."""
    tokens = config.step.microbatch * config.data.sequence_length
    return [_saved(block) * tokens * itemsize_of(config) for _, block in blocks(model)]


def logits(model: nn.Module, config: RunConfig) -> int:
    """Logits, their float32 copy and their gradient, of the tokens that have them at one time."""
    vocabulary = int(text_config(model).vocab_size)
    tokens = config.step.microbatch * config.data.sequence_length
    chunk = min(config.memory.loss_chunk or tokens, tokens)
    return chunk * vocabulary * (2 * itemsize_of(config) + 4 + 4)


def itemsize_of(config: RunConfig) -> int:
    """Bytes of one number in the run's precision."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype.itemsize


def available(device: torch.device, output: Path, config: RunConfig) -> dict[str, int]:
    """What one rank may use."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = psutil.virtual_memory().available // ranks_here
    existing = next(p for p in (output, *output.absolute().parents) if p.exists())
    of_device = int(config.memory.device_gib * GIB)
    if not of_device:
        of_device = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host
    return {"device": of_device, "host": host, "disk": shutil.disk_usage(existing).free}


def measured(device: torch.device) -> dict[str, int]:
    """Peak bytes so far: of the device's allocator, and of the process (which on a CPU holds everything)."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        return {"device": torch.cuda.max_memory_allocated(device), "host": resident}
    return {"device": resident, "host": resident}


def _saved(block: nn.Module) -> int:
    """Elements a token that a block keeps for backward: inputs and outputs of its linear layers and its norms."""
    elements = 0
    for module in block.modules():
        if isinstance(module, nn.Linear):
            elements += module.in_features + module.out_features
        elif any(p.ndim == 3 for p in module._parameters.values() if p is not None):
            widths = [max(p.shape[1:]) for p in module._parameters.values() if p is not None and p.ndim == 3]
            elements += 8 * sum(widths)  # a token's row for each of about eight experts
        elif any(p.ndim == 1 for p in module._parameters.values() if p is not None):
            elements += 2 * sum(p.numel() for p in module._parameters.values() if p is not None and p.ndim == 1)
    return elements


def _is_sharded(parameter: nn.Parameter) -> bool:
    return local(parameter).numel() != parameter.numel()


def _size(n: int) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB / 10 else f"{n / (1 << 20):.1f} MiB"
