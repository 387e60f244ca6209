"""Whether a twin is alive and learns: 20 optimizer steps on one batch, and what the first gradients say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from onboarding.twin.models import build, loss_on, step_inputs
from onboarding.twin.plan import TwinPlan

STEPS = 20
RATE = 3e-3
FALL = 0.95
"""The last loss must be below this share of the first."""


@dataclass(kw_only=True)
class Learned:
    """What 20 steps showed."""

    losses: list[float]
    dead: list[str] = field(default_factory=list)
    """Parameters that got a gradient of zeros: a branch that does nothing."""
    without_gradient: list[str] = field(default_factory=list)
    """Parameters that the loss does not reach."""

    @property
    def good(self) -> bool:
        """Every loss finite, and the last clearly below the first."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it is not good; empty if it is."""
        if not all(map(math.isfinite, self.losses)):
            return f"a loss is not finite: {[round(loss, 3) for loss in self.losses]}"
        if self.losses[-1] >= FALL * self.losses[0]:
            return f"the loss goes from {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {len(self.losses)} steps"
        return ""


def learn(plan: TwinPlan, *, steps: int = STEPS, seed: int = 0) -> Learned:
    """Build the twin and train it on one fixed batch with AdamW.

    Args:
        plan: from :func:`onboarding.twin.derive`.
        steps: optimizer steps.
        seed: of values and tokens.
    """
    model: Any = build(plan, seed=seed)
    length = int(plan.sizes["sequence_length"])
    inputs = step_inputs(model, length, batch=2, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    learned = Learned(losses=[])
    for step in range(steps):
        loss = loss_on(model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        learned.losses.append(float(loss.detach()))
        if step == 0:
            _note_gradients(model, learned)
        optimizer.step()
        optimizer.zero_grad()
    return learned


def _note_gradients(model: Any, learned: Learned) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            learned.without_gradient.append(name)
        elif not bool(parameter.grad.abs().sum() > 0):
            learned.dead.append(name)
