"""Shapes and inputs on which a linear cross-entropy is judged: ignored rows, confident rows, odd sizes, no rows."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.linear_cross_entropy.spec import Spec

ODD_HIDDEN = (16, 33, 60, 96, 130)
ODD_VOCABULARY = (7, 100, 129, 257, 500)
DISTRIBUTIONS = ("normal", "confident", "some_ignored", "large")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full width."""
    fixed = [
        (rng.randint(100, 130), 64, rng.randint(400, 500), "some_ignored"),
        (rng.randint(20, 60), rng.choice(ODD_HIDDEN), rng.choice(ODD_VOCABULARY), "normal"),
        (rng.randint(30, 60), rng.choice(ODD_HIDDEN), rng.randint(200, 400), "confident"),
        (1, rng.choice(ODD_HIDDEN), rng.choice(ODD_VOCABULARY), "normal"),
        (rng.randint(20, 40), 48, rng.choice(ODD_VOCABULARY), "large"),
        (rng.randint(5, 20), rng.choice(ODD_HIDDEN), rng.choice(ODD_VOCABULARY), "all_ignored"),
        (0, 64, 129, "normal"),
    ]
    if level == "compiled":
        rows = rng.randint(600, 700)
        fixed.insert(0, (rows, spec.hidden, min(spec.vocabulary, 20_000 + rng.randint(1, 64)), "some_ignored"))
        fixed.insert(3, (rng.randint(1000, 1100), 512, 4096, "confident"))
    while len(fixed) < count:
        sizes = (rng.randint(1, 110), rng.choice(ODD_HIDDEN), rng.choice(ODD_VOCABULARY))
        fixed.append((*sizes, rng.choice(DISTRIBUTIONS)))
    return [
        Case(
            name=f"{i}: {rows} rows of {hidden}, {vocabulary} classes, {distribution}",
            dims={"rows": rows, "hidden": hidden, "vocabulary": vocabulary},
            dtype=spec.dtype,
            distribution=distribution,
            # every other case divides by a count that is not its own
            options={"denominator": i % 2 == 1},
        )
        for i, (rows, hidden, vocabulary, distribution) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {"rows": tokens, "hidden": spec.hidden, "vocabulary": spec.vocabulary}
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype, options={"denominator": False})


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """x [N, D] and weight [V, D] with logits of about 1 (``large``: 8), bias [V], target [N], denominator []."""
    rows, hidden, vocabulary = case.dims["rows"], case.dims["hidden"], case.dims["vocabulary"]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    def classes(*size: int) -> Tensor:
        return torch.randint(0, vocabulary, size, generator=generator, device=generator.device)

    target = classes(rows)
    weight = normal(vocabulary, hidden)
    x = normal(rows, hidden) * ((8.0 if case.distribution == "large" else 1.0) / (hidden**0.5 * abs(spec.logit_scale)))
    if case.distribution == "confident":
        # the target's logit stands some 6 above the others
        chosen = weight[target]
        x = 0.3 * x + 6.0 * chosen / (chosen.square().sum(-1, keepdim=True) * spec.logit_scale)
    if case.distribution == "some_ignored" and rows:
        target[classes(rows) % 3 == 0] = spec.ignore_index
        target[0], target[-1] = 0, vocabulary - 1
    if case.distribution == "all_ignored":
        target.fill_(spec.ignore_index)
    tensors: dict[str, Tensor | None] = {"x": x, "weight": weight}
    if spec.bias:
        tensors["bias"] = normal(vocabulary)
    tensors = {n: None if t is None else t.to(device=device, dtype=dtype) for n, t in tensors.items()}
    tensors["target"] = target.to(device)
    if spec.reduction == "mean":
        given = case.options.get("denominator")
        tensors["denominator"] = torch.tensor(2.5 * rows + 1.0, device=device) if given else None
    return tensors
