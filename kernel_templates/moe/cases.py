"""Shapes, routings and values on which experts are judged: odd sizes, empty and crowded experts, slots without one."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.moe.spec import Spec

ROUTINGS = ("uniform", "skewed", "one_expert", "half_empty", "absent", "duplicates")
"""``skewed``: popularity falls as 1/rank; ``half_empty``: odd experts get nothing; ``absent``: some slots have none."""

FEW = 10_000
"""Gates of a case in which a limit is tested."""

# odd on purpose: no multiple of a tile, some past one tile of the interpreter's configuration
ODD_HIDDEN = (16, 21, 33, 48, 60, 75, 129)
ODD_INTERMEDIATE = (16, 17, 24, 31, 45)


class _Sizes(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    routing: str
    fp32_scores: bool = False


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``compiled`` ones include the published sizes.

    The gradient of a score is one product of random vectors, which may cancel to nothing: no case has fewer than six
    scores. The published width and the published number of experts come in separate cases: together their fp64
    weights would fill the device.
    """
    top_k = min(spec.top_k, 4)
    many = [
        _Sizes(rng.randint(33, 40), top_k, 8, 48, 32, "absent", True),
        _Sizes(rng.randint(20, 40), 2, 5, rng.choice((75, 129)), rng.choice((31, 45)), "skewed"),
        _Sizes(rng.randint(80, 100), 3, 4, 33, 17, "one_expert"),
        _Sizes(1, 6, 8, 21, 24, "uniform", True),
        _Sizes(rng.randint(5, 17), 4, 4, 60, 16, "duplicates"),
        _Sizes(0, 2, 4, 16, 16, "uniform"),
        _Sizes(rng.randint(12, 17), 1, 1, 60, 45, "uniform"),
        _Sizes(rng.randint(10, 40), min(top_k, 2), 8, 64, 32, "half_empty", True),
    ]
    if level == "compiled":
        many[1:1] = [
            _Sizes(300 + rng.randint(0, 99), min(spec.top_k, 4), 8, spec.hidden, spec.intermediate, "skewed", True),
            _Sizes(2000 + rng.randint(0, 99), spec.top_k, spec.experts, 64, 32, "skewed"),
            _Sizes(700 + rng.randint(0, 99), 2, 4, 1025, 60, "absent"),
        ]
    while len(many) < count:
        experts = rng.randint(1, 8)
        many.append(
            _Sizes(
                rng.randint(8, 40),
                rng.randint(1, min(experts, 4)),
                experts,
                rng.choice(ODD_HIDDEN),
                rng.choice(ODD_INTERMEDIATE),
                rng.choice(ROUTINGS),
                rng.random() < 0.5,
            )
        )
    return [
        Case(
            name=f"{i}: {c.tokens} tokens to {c.top_k} of {c.experts}, {c.hidden} x {c.intermediate}, {c.routing}",
            dims=dict(zip(c._fields[:5], c[:5], strict=True)),
            dtype=spec.dtype,
            distribution=c.routing,
            options={"fp32_scores": c.fp32_scores},
        )
        for i, c in enumerate(many[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {
        "tokens": tokens,
        "top_k": spec.top_k,
        "experts": spec.experts,
        "hidden": spec.hidden,
        "intermediate": spec.intermediate,
    }
    return Case(
        name=f"{tokens} tokens",
        dims=dims,
        dtype=spec.dtype,
        distribution="uniform",
        options={"fp32_scores": False},
    )


def routing(case: Case, generator: torch.Generator) -> Tensor:
    """index [T, K] int64 by the case's distribution; without duplicates inside a token unless they are asked for."""
    tokens, top_k, experts = (case.dims[n] for n in ("tokens", "top_k", "experts"))
    device = generator.device
    popularity = torch.ones(experts, device=device)
    if case.distribution == "skewed":
        popularity = 1.0 / torch.arange(1, experts + 1, device=device)
    elif case.distribution == "half_empty":
        popularity[1::2] = 0.0
    if case.distribution == "one_expert":
        return torch.full((tokens, top_k), experts - 1, device=device)
    if case.distribution == "duplicates":
        return torch.randint(0, max(experts // 2, 1), (tokens, top_k), generator=generator, device=device)
    if tokens == 0:
        return torch.zeros(0, top_k, dtype=torch.int64, device=device)
    hit = (experts + 1) // 2 if case.distribution == "half_empty" else experts
    index = torch.multinomial(popularity.expand(tokens, -1), min(top_k, hit), generator=generator)
    # more slots than experts with any popularity: the rest go nowhere
    index = torch.nn.functional.pad(index, (0, top_k - index.shape[1]), value=experts)
    if case.distribution == "absent":
        nowhere = torch.tensor([experts, experts + 3, -1], device=device)
        pick = torch.randint(0, 3, index.shape, generator=generator, device=device)
        absent = torch.rand(index.shape, generator=generator, device=device) < 0.3
        index = torch.where(absent, nowhere[pick], index)
    return index


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Inputs of ``spec``, unit variance; scores may be fp32; gate and up cross the limit in small cases."""
    tokens, top_k, experts, hidden, intermediate = case.dims.values()

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    spread = 1.0
    if spec.limit is not None:
        # among many values one lies within rounding of the limit, where its gradient is right either way: small cases
        # clamp a tenth of theirs, large ones none
        spread = (0.7 if tokens * top_k * intermediate < FEW else 0.15) * spec.limit
    gate_up = normal(experts, 2 * intermediate, hidden) * (spread / hidden**0.5)
    down = normal(experts, hidden, intermediate) / intermediate**0.5
    scores = torch.rand(tokens, top_k, generator=generator, device=generator.device) + 0.05
    tensors: dict[str, Tensor | None] = {
        "x": normal(tokens, hidden).to(dtype),
        "index": routing(case, generator),
        "scores": scores.to(torch.float32 if case.options["fp32_scores"] else dtype),
        "gate_up": (gate_up.transpose(1, 2).contiguous() if spec.transposed else gate_up).to(dtype),
        "down": (down.transpose(1, 2).contiguous() if spec.transposed else down).to(dtype),
    }
    if spec.bias:
        tensors["gate_up_bias"] = (0.5 * spread * normal(experts, 2 * intermediate)).to(dtype)
        tensors["down_bias"] = normal(experts, hidden).to(dtype)
    return {n: None if t is None else t.to(device) for n, t in tensors.items()}
