"""Shapes and inputs on which a gated activation is judged: odd widths, saturated gates, values at the clamp."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.gated_activation.spec import Spec

ODD_WIDTHS = (1, 3, 31, 60, 100, 127, 129, 255, 257)
DISTRIBUTIONS = ("normal", "tiny", "saturated", "edges")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    largest = spec.width if level == "compiled" else min(spec.width, 512)
    fixed = [
        (rng.randint(33, 70), largest, "normal"),
        (rng.randint(2, 9), rng.choice((31, 100, 127)), "edges"),
        (rng.randint(70, 140), rng.choice((129, 257)), "saturated"),
        (1, rng.choice((3, 60, 255)), "normal"),
        (rng.randint(100, 300), rng.choice((1, 3, 31)), "tiny"),
        (0, largest, "normal"),
    ]
    if level == "compiled":
        fixed.insert(1, (4096 + rng.randint(1, 64), spec.width, "edges"))
    while len(fixed) < count:
        fixed.append((rng.randint(1, 120), rng.choice((*ODD_WIDTHS, largest)), rng.choice(DISTRIBUTIONS)))
    return [
        Case(
            name=f"{i}: {rows} rows of {width}, {distribution}",
            dims={"rows": rows, "width": width},
            dtype=spec.dtype,
            distribution=distribution,
        )
        for i, (rows, width, distribution) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    return Case(name=f"{tokens} tokens", dims={"rows": tokens, "width": spec.width}, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """gate and up [rows, width], or gate_up [rows, 2 width] in the spec's layout, in ``dtype``."""
    shape = (case.dims["rows"], case.dims["width"])
    # fp16 has no digits left where the product of two tiny numbers lies
    tiny = 0.1 if dtype == torch.float16 else 1e-3
    spread = {"tiny": tiny, "saturated": 12.0}.get(case.distribution, 1.5)
    gate, up = (spread * torch.randn(shape, generator=generator, device=generator.device) for _ in range(2))
    if case.distribution == "edges":
        # exactly at, just inside and just outside of where the function or its gradient changes
        edge = 1.0 if spec.limit is None else spec.limit
        marks = torch.tensor([0.0, edge, -edge, 0.99 * edge, 1.01 * edge, -1.01 * edge, 4 * edge, -4 * edge])
        marks = marks.to(generator.device)
        for t in (gate, up):
            chosen = torch.randint(0, len(marks), shape, generator=generator, device=generator.device)
            half = torch.rand(shape, generator=generator, device=generator.device) < 0.5
            t.copy_(torch.where(half, marks[chosen], t))
    gate, up = gate.to(device=device, dtype=dtype), up.to(device=device, dtype=dtype)
    if spec.layout == "separate":
        return {"gate": gate, "up": up}
    if spec.layout == "concatenated":
        return {"gate_up": torch.cat([gate, up], dim=-1)}
    return {"gate_up": torch.stack([gate, up], dim=-1).flatten(-2)}
