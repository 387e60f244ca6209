"""Shapes and inputs on which attention residuals are judged: odd sizes, sharp choices, equal and empty sources."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.attention_residual.spec import Spec
from kernel_templates.case import Case

ODD_HIDDEN = (2, 7, 60, 100, 127, 128, 129, 192, 257)
DISTRIBUTIONS = ("normal", "sharp", "tiny", "large", "equal", "zero_source")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    largest = spec.hidden if level == "compiled" else min(spec.hidden, 512)
    fixed = [
        (rng.randint(17, 40), 1, largest, "normal"),
        (rng.randint(2, 9), rng.choice((3, 5)), rng.choice(ODD_HIDDEN), "normal"),
        (rng.randint(5, 20), 1, rng.choice((100, 129, 257)), "sharp"),
        (rng.randint(12, 30), 1, rng.choice((60, 192)), "tiny"),
        (rng.randint(2, 20), 1, rng.choice((127, 192)), "large"),
        (0, 1, largest, "normal"),
        (rng.randint(3, 12), 1, largest, "zero_source"),
        (rng.randint(3, 12), 2, 128, "equal"),
    ]
    if level == "compiled":
        fixed.insert(1, (1024 + rng.randint(1, 64), 1, spec.hidden, "normal"))
    while len(fixed) < count:
        rows = (rng.randint(1, 20), rng.randint(1, 3))
        fixed.append((*rows, rng.choice((*ODD_HIDDEN[2:], largest)), rng.choice(DISTRIBUTIONS)))
    return [
        Case(
            name=f"{i}: {spec.sources} sources, {rows} x {heads} rows of {hidden}, {distribution}",
            dims={"rows": rows, "heads": heads, "hidden": hidden},
            dtype=spec.dtype,
            distribution=distribution,
        )
        for i, (rows, heads, hidden, distribution) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {"rows": tokens, "heads": 1, "hidden": spec.hidden}
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Sources of mean square 1 (``tiny`` 4e-6, ``large`` 9e4), a query for scores of about 1 (``sharp``: 3)."""
    shape = (case.dims["rows"], case.dims["heads"], case.dims["hidden"])

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    size = {"tiny": 2e-3, "large": 300.0}.get(case.distribution, 1.0)
    query = normal(shape[-1]) * shape[-1] ** -0.5 / spec.scale * (3.0 if case.distribution == "sharp" else 1.0)
    sources = [normal(*shape) * size for _ in range(spec.sources)]
    if case.distribution == "zero_source":
        sources[-1] = torch.zeros_like(sources[-1])
    if case.distribution == "equal":
        sources[1] = sources[0].clone()
    tensors = {"query": query} | {f"v{i}": v for i, v in enumerate(sources)}
    return {n: t.to(device=device, dtype=dtype) for n, t in tensors.items()}
