"""One optimizer step: micro-batches, one synchronisation, one norm, and the decision whether to move at all."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runtime.config import StepConfig
from runtime.data.stream import Rows
from runtime.experts.balance import LoadReport
from runtime.memory.swap_cache import SwapCache
from runtime.packing import Boundaries
from runtime.parallel.clip import clip_grad_norm
from runtime.parallel.gradients import after_optimizer_step, counting, finish_gradients, set_gradient_sync
from runtime.parallel.meshes import Meshes
from runtime.refusal import Refused

SMOOTHING = 0.9
"""Of the running mean of gradient norms that spikes are measured by."""
SETTLING = 10
"""Steps before a spike can be told."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did; the same on every rank."""

    loss: float
    """Mean over the step's counted tokens of all ranks."""
    grad_norm: float
    """Before clipping."""
    counted: int
    """Tokens that the loss counts, over all ranks."""
    tokens: int
    """Tokens that are no padding, over all ranks."""
    skipped: str = ""
    """Why the weights did not move; empty if they did."""
    stop: bool = False
    """Whether any rank wished to stop."""
    load: LoadReport | None = None
    """Of the experts."""


@dataclass(kw_only=True)
class Health:
    """What the step remembers of the ones before; part of every checkpoint."""

    mean_norm: float = 0.0
    seen: int = 0
    bad_in_a_row: int = 0

    def verdict(self, loss: float, norm: float, config: StepConfig) -> str:
        """Why a step is not fit to move weights; empty if it is. Remembers what it saw."""
        reason = ""
        if not math.isfinite(loss) or not math.isfinite(norm):
            reason = f"loss {loss}, gradient norm {norm}: not finite"
        elif config.spike and self.seen >= SETTLING and norm > config.spike * self.mean_norm:
            reason = f"gradient norm {norm:.3g} is more than {config.spike:g} x the mean of {self.mean_norm:.3g}"
        if reason:
            self.bad_in_a_row += 1
            return reason
        self.bad_in_a_row = 0
        self.mean_norm = norm if self.seen == 0 else SMOOTHING * self.mean_norm + (1 - SMOOTHING) * norm
        self.seen += 1
        return ""


@dataclass(kw_only=True)
class Stepper:
    """Runs the steps of one model on one rank."""

    model: nn.Module
    """Sharded; called with ids, positions and labels it gives the summed loss."""
    optimizers: list[Any]
    meshes: Meshes
    config: StepConfig
    device: torch.device
    boundaries: Boundaries
    cache: SwapCache | None = None
    seed: int = 0
    passed: Callable[[], None] = lambda: None
    """Called after forward and backward of each micro-batch."""
    health: Health = field(default_factory=Health)

    def run(self, step: int, microbatches: Sequence[Rows], *, wish: bool = False) -> StepResult:
        """Forward, backward and update.

        Args:
            step: its number; dropout draws from it, so that a resumed run repeats the same masks.
            microbatches: this rank's, as many on every rank.
            wish: whether this rank wants the run to stop; told to all with the loss.

        Raises:
            Refused: ``bad-steps``: too many in a row were not fit to move weights.
        """
        torch.manual_seed(hash_of(self.seed, step, self.meshes.rank))
        mine = [sum(rows.trained for rows in microbatches), sum(int(rows.mask.sum()) for rows in microbatches)]
        counted, real = self._sum(mine)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, rows in enumerate(microbatches):
            set_gradient_sync(self.model, number == len(microbatches) - 1)
            total += self._pass(rows.to(self.device), max(counted, 1.0))
        finish_gradients(self.model)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norm = float(clip_grad_norm(parameters, self.meshes, self.config.max_norm or math.inf))
        summed, wishes = self._sum([total.item(), float(wish)])
        loss = summed / max(counted, 1.0)
        skipped = self.health.verdict(loss, norm, self.config)
        if not skipped:
            for optimizer in self.optimizers:
                optimizer.step()
        load = after_optimizer_step(self.model)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.health.bad_in_a_row > self.config.bad_steps:
            detail = f"{skipped}; lower the rate, look at the data of these steps, or raise step.bad_steps"
            raise Refused("bad-steps", f"{self.health.bad_in_a_row} steps in a row moved nothing", detail)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            counted=int(counted),
            tokens=int(real),
            skipped=skipped,
            stop=wishes > 0,
            load=load,
        )

    def _pass(self, rows: Rows, counted: float) -> torch.Tensor:
        """Forward and backward of one micro-batch; gives its summed loss."""
        self.boundaries.set(rows.lengths, self.device)
        if self.cache is not None:
            self.cache.begin()
        with counting(self.model, mask=rows.mask, global_tokens=counted):
            summed = self.model(input_ids=rows.ids, position_ids=rows.positions, labels=rows.labels)
            (summed / counted).backward()
        self.passed()
        loss: torch.Tensor = summed.detach().double()
        return loss

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Each over all ranks, in float64."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [float(v) for v in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor.tolist()]


def be_deterministic() -> None:
    """Only algorithms that give the same bits every time; raises later where an operator has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def hash_of(*numbers: int) -> int:
    """A seed out of several numbers (SplitMix64 over them)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
