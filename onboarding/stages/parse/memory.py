"""What training the model at its published size needs, before anything is sharded: an estimate for one sequence.

Weights and gradients have the parameters' own dtypes. AdamW keeps two float32 moments, and a float32 copy of what is
narrower. Activations are what autograd was seen to keep in the trace: every storage once, parameters left out,
attention as FlashAttention keeps it (q, k, v), experts their inputs. With recomputation, a block keeps its input only
and one block at a time is whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from onboarding.architecture import Growth, MemoryEstimate
from onboarding.stages.parse.growth import add, law, laws_of, scale
from onboarding.stages.parse.roles import ModelRoles
from onboarding.stages.parse.tracer import Trace


def estimate_memory(model: nn.Module, roles: ModelRoles, trace: Trace) -> MemoryEstimate:
    """Bytes of weights, gradients, optimizer and activations."""
    weights = optimizer = 0
    for parameter in model.parameters():
        weights += parameter.numel() * parameter.element_size()
        optimizer += parameter.numel() * (8 if parameter.element_size() >= 4 else 12)
    kept = _kept(roles, trace)
    laws = laws_of(_kept(roles, trace.shorter), kept, trace.tokens) if trace.shorter is not None else None
    if laws is None:
        laws = {place: law(size / 2, size, max(trace.tokens, 1)) for place, size in kept.items()}
    repeats = {kind.first: len(kind.layers) for kind in roles.structure.kinds}
    outside = laws.get(None, Growth())
    blocks = {place: one for place, one in laws.items() if place is not None}
    largest = max(blocks.values(), key=lambda one: one.at(trace.tokens), default=Growth())
    entry = Growth(linear=float(_width(model, roles) * 2 * sum(repeats.values())))
    return MemoryEstimate(
        weights=weights,
        gradients=weights,
        optimizer=optimizer,
        activations=add([outside, *(scale(one, repeats.get(place, 1)) for place, one in blocks.items())]),
        recomputed=add([outside, entry, largest]),
    )


def _kept(roles: ModelRoles, trace: Trace) -> dict[Any, float]:
    """Kept bytes by layer (its number), None for what lies outside the layers."""
    found: dict[Any, float] = defaultdict(float)
    for path, size in trace.saved.items():
        found[roles.layer_of(path.partition("#")[0])] += size
    return dict(found)


def _width(model: Any, roles: ModelRoles) -> int:
    width = getattr(roles.structure.text_config, "hidden_size", None)
    return int(width) if isinstance(width, int) else int(model.get_input_embeddings().weight.shape[-1])
