"""Shapes and inputs on which a norm is judged: odd and boundary sizes, many and few rows, extreme values."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.norm.spec import Spec

# odd on purpose: one short of a power of two, one past it, primes
ODD_HIDDEN = (2, 7, 60, 100, 127, 128, 129, 192, 257)
DISTRIBUTIONS = ("normal", "tiny", "large", "outlier", "zero_rows")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    largest = spec.hidden if level == "compiled" else min(spec.hidden, 512)
    fixed = [
        (rng.randint(33, 80), 1, largest, "normal"),
        (rng.randint(2, 9), rng.choice((3, 5)), rng.choice(ODD_HIDDEN), "normal"),
        (1, 1, rng.choice((100, 129, 257)), "outlier"),
        (rng.randint(130, 300), 1, rng.choice((7, 60)), "tiny"),
        (rng.randint(2, 20), 1, rng.choice((127, 192)), "large"),
        (0, 1, largest, "normal"),
        (rng.randint(3, 70), 1, largest, "zero_rows"),
    ]
    if level == "compiled":
        fixed.insert(1, (4096 + rng.randint(1, 64), 1, spec.hidden, "normal"))
    while len(fixed) < count:
        rows = (rng.randint(1, 90), rng.randint(1, 3))
        fixed.append((*rows, rng.choice((*ODD_HIDDEN, largest)), rng.choice(DISTRIBUTIONS)))
    return [
        Case(
            name=f"{i}: {rows} x {heads} rows of {hidden}, {distribution}",
            dims={"rows": rows, "heads": heads, "hidden": hidden},
            dtype=spec.dtype,
            distribution=distribution,
        )
        for i, (rows, heads, hidden, distribution) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    # a norm of heads has several rows a token
    heads = 32 if spec.hidden <= 256 else 1
    return Case(name=f"{tokens} tokens", dims={"rows": tokens, "heads": heads, "hidden": spec.hidden}, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """x, gate, residual [rows, heads, hidden] in ``dtype``, weight [hidden] near 1 (or near 0 with an offset)."""
    shape = (case.dims["rows"], case.dims["heads"], case.dims["hidden"])

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    x = normal(*shape) * {"tiny": 2e-3, "large": 300.0}.get(case.distribution, 1.0)
    if case.distribution == "outlier":
        x[..., -1] *= 100.0
    if case.distribution == "zero_rows" and shape[0]:
        x[::3] = 0.0
    tensors: dict[str, Tensor | None] = {"x": x}
    if spec.weighted:
        tensors["weight"] = 0.3 * normal(shape[-1]) + (0.0 if spec.offset else 1.0)
    if spec.bias:
        tensors["bias"] = 0.5 * normal(shape[-1])
    if spec.gate != "none":
        tensors["gate"] = 2.0 * normal(*shape)
    if spec.residual:
        tensors["residual"] = normal(*shape)
    return {n: None if t is None else t.to(device=device, dtype=dtype) for n, t in tensors.items()}
