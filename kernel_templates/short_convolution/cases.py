"""Shapes and inputs on which the short convolution is judged: short sequences, packed ones, states."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.short_convolution.spec import Spec

# odd on purpose: one short of a power of two, one past it, primes
ODD_CHANNELS = (1, 3, 31, 33, 60, 100, 127, 129, 257)
DISTRIBUTIONS = ("normal", "mean", "outlier", "saturated", "tiny")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    compiled = level == "compiled"
    channels = spec.channels if compiled else min(spec.channels, 96)
    around = spec.width
    packed = [0, 1, around - 1, around, around + 1, rng.randint(20, 60), 2]
    rng.shuffle(packed)
    # batch, length or lengths of packed sequences, channels, distribution, initial state
    fixed: list[tuple[int, int | list[int], int, str, bool]] = [
        (2, rng.choice((53, 67, 79)), channels, "normal", True),
        (1, packed, rng.choice(ODD_CHANNELS[3:]), "normal", True),
        (1, rng.choice((127, 129, 131)), rng.choice(ODD_CHANNELS[3:]), "mean", False),
        (3, around - 1, channels, "normal", True),
        (1, packed[::-1], channels, "outlier", False),
        (2, 0, channels, "normal", True),
        (2, 1, rng.choice(ODD_CHANNELS), "saturated", True),
        (1, 64, channels, "tiny", True),
    ]
    if compiled:
        fixed.insert(1, (1, 4096 + rng.randint(1, 64), spec.channels, "normal", True))
    while len(fixed) < count:
        drawn = rng.randint(1, 150)
        lengths: int | list[int] = [rng.randint(0, 12) for _ in range(5)] + [drawn] if rng.random() < 0.4 else drawn
        width = rng.choice((*ODD_CHANNELS, channels))
        fixed.append((1, lengths, width, rng.choice(DISTRIBUTIONS), rng.random() < 0.5))
    return [_case(spec, i, *entry) for i, entry in enumerate(fixed[:count])]


def _case(
    spec: Spec, index: int, batch: int, length: int | list[int], channels: int, distribution: str, state: bool
) -> Case:
    packed, tokens = (length, sum(length)) if isinstance(length, list) else (None, length)
    state = state and spec.states
    words = f"packed {packed}" if packed else f"{batch} x {tokens} tokens"
    return Case(
        name=f"{index}: {words} of {channels} channels, {distribution}{', state' if state else ''}",
        dims={"batch": batch, "length": tokens, "channels": channels},
        dtype=spec.dtype,
        distribution=distribution,
        options={"initial_state": state, "lengths": packed},
    )


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {"batch": 1, "length": tokens, "channels": spec.channels}
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """All in ``dtype``: x [B, T, D], weight [D, W] and bias [D] of the size that torch initialises, states like x."""
    batch, length, channels = case.dims["batch"], case.dims["length"], case.dims["channels"]
    lengths = case.options.get("lengths")
    kind = case.distribution

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    x = normal(batch, length, channels) * {"tiny": 2e-3, "saturated": 30.0}.get(kind, 1.0)
    if kind == "mean":
        x = x + 2.0
    if kind == "outlier":
        x[..., -1] *= 100.0
    tensors: dict[str, Tensor | None] = {"x": x, "weight": normal(channels, spec.width) * spec.width**-0.5}
    if spec.bias:
        tensors["bias"] = 0.5 * normal(channels)
    if spec.states:
        sequences = len(lengths) if lengths else batch
        given = bool(case.options.get("initial_state"))
        tensors["initial_state"] = normal(sequences, channels, spec.width - 1) if given else None
    made = {n: None if t is None else t.to(device=device, dtype=dtype) for n, t in tensors.items()}
    made["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], device=device) if lengths else None
    return made
