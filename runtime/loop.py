"""The training loop of one process: causal language modelling with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train in place and return the loss before each update.

    Args:
        model: a transformers causal language model; it shifts the labels itself.
        batches: int64 [batch, sequence_length], as many as steps at least.
        steps: optimizer steps.
        lr: constant learning rate.
        betas: of AdamW.
        weight_decay: decoupled; matrices only, as is usual (norm scales, biases and decays are left alone).
        on_step: called with (step from 1, loss).

    Raises:
        ArithmeticError: the loss is not finite; names the step.
        ValueError: the batches end early.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(_groups(model, weight_decay), lr=lr, betas=betas)
    losses: list[float] = []
    for step, ids in zip(range(1, steps + 1), batches, strict=False):
        loss = language_model_loss(model, ids.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if not torch.isfinite(loss):
            raise ArithmeticError(f"the loss of step {step} is {losses[-1]}")
        if on_step is not None:
            on_step(step, losses[-1])
    if len(losses) < steps:
        raise ValueError(f"{len(losses)} batches for {steps} steps")
    return losses


def language_model_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss of ids [batch, sequence_length]."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
