"""The optimizer of a run, and its learning rate at every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from runtime.config import OptimizerConfig
from runtime.memory.offload import HostState
from runtime.model import blocks


def make_optimizers(model: nn.Module, config: OptimizerConfig, *, offload: bool) -> list[Any]:
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.

    Args:
        model: sharded; only parameters that require gradients are taken.
        config: rates and decay; decay is for matrices only.
        offload: state rests in host memory.
    """
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    muon: list[nn.Parameter] = []
    if config.name == "muon":
        inside = {id(p) for _, block in blocks(model) for p in block.parameters()}
        muon = [p for _, p in trained if p.ndim == 2 and id(p) in inside]
    taken = {id(p) for p in muon}
    rest = [(n, p) for n, p in trained if id(p) not in taken]
    made: list[Any] = []
    if rest:
        groups = [
            {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (config.betas[0], config.betas[1])
        made.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, eps=config.eps))
    if muon:
        made.append(torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay))
    return [HostState(o) for o in made] if offload else made


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of a step.

    Args:
        config: peak, warm-up, schedule.
        step: from 1.
        steps: of the whole run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or steps <= config.warmup_steps + 1:
        return config.lr
    progress = (step - config.warmup_steps - 1) / (steps - config.warmup_steps - 1)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)


def set_rate(optimizers: list[Any], value: float) -> None:
    """Give every group its rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = value
