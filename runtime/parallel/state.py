"""What ``parallelize`` leaves with a model, for the functions that the loop calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from runtime.experts.layer import ExpertsLayer
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes


@dataclass(kw_only=True)
class ParallelState:
    """Layout of one model."""

    meshes: Meshes
    config: ParallelConfig
    layers: list[ExpertsLayer] = field(default_factory=list)
    replicated: list[nn.Parameter] = field(default_factory=list)
    """Small fp32 parameters that every rank holds whole; their gradients are summed by ``finish_gradients``."""


_KEY = "_onboard_parallel"


def attach(model: nn.Module, state: ParallelState) -> None:
    """Remember ``state`` with ``model``."""
    model.__dict__[_KEY] = state


def state_of(model: nn.Module) -> ParallelState:
    """The layout of a parallelized model.

    Raises:
        ValueError: ``parallelize`` has not run.
    """
    state = model.__dict__.get(_KEY)
    if not isinstance(state, ParallelState):
        raise ValueError("call runtime.parallel.parallelize(model, ...) first")
    return state
