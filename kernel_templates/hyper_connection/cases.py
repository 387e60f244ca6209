"""Shapes and inputs on which hyper-connections are judged: narrow and wide logits, streams far apart, odd sizes."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.hyper_connection.spec import Spec

ODD_HIDDEN = (3, 17, 31, 33, 60, 100, 127, 129)
DISTRIBUTIONS = ("normal", "wide", "mean", "outlier", "tiny")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    compiled = level == "compiled"
    hidden = spec.hidden if compiled else min(spec.hidden, 64)
    # batch, tokens, hidden, distribution, dtype of the parameters
    fixed = [
        (2, rng.choice((29, 37, 41)), hidden, "normal", "wide"),
        (1, rng.choice((63, 65, 67)), rng.choice(ODD_HIDDEN), "wide", "wide"),
        (1, rng.choice((13, 19)), rng.choice(ODD_HIDDEN[1:]), "mean", "narrow"),
        (1, 1, hidden, "normal", "wide"),
        (3, 0, hidden, "normal", "wide"),
        (2, 17, hidden, "outlier", "narrow"),
        (1, 24, rng.choice(ODD_HIDDEN[1:]), "tiny", "wide"),
    ]
    if compiled:
        fixed.insert(1, (1, 2048 + rng.randint(1, 64), spec.hidden, "normal", "wide"))
    while len(fixed) < count:
        drawn = (rng.randint(1, 3), rng.randint(1, 60), rng.choice((*ODD_HIDDEN, hidden)))
        fixed.append((*drawn, rng.choice(DISTRIBUTIONS), rng.choice(("wide", "narrow"))))
    return [
        Case(
            name=f"{i}: {batch} x {tokens} tokens, streams of {width}, {distribution}, {parameters} parameters",
            dims={"batch": batch, "tokens": tokens, "hidden": width},
            dtype=spec.dtype,
            distribution=distribution,
            options={"parameters": parameters},
        )
        for i, (batch, tokens, width, distribution, parameters) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {"batch": 1, "tokens": tokens, "hidden": spec.hidden}
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """x [B, T, n, C] in ``dtype``; fn [M, n C] in it or in fp32; base [M] and scale in fp32 at least."""
    batch, tokens, hidden = case.dims["batch"], case.dims["tokens"], case.dims["hidden"]
    size = spec.streams * hidden
    kind = case.distribution

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    x = normal(batch, tokens, spec.streams, hidden)
    if kind == "mean":
        x = x + 1.5
    if kind == "outlier":
        x[..., 0, :] *= 30.0
    if kind == "tiny":
        x = x * 1e-3
    # logits of unit width, and of four where most of a row lies on one stream
    spread = 4.0 if kind == "wide" else 1.0
    wide = torch.promote_types(dtype, torch.float32)
    fn = normal(spec.columns, size) * size**-0.5
    narrow = case.options.get("parameters") == "narrow"
    tensors: dict[str, Tensor | None] = {
        "x": x.to(dtype),
        "fn": fn.to(dtype if narrow else wide),
        "base": (0.5 * spread * normal(spec.columns)).to(wide),
        "scale": (spread * (1.0 + 0.2 * normal(spec.parts))).to(wide),
    }
    return {n: None if t is None else t.to(device) for n, t in tensors.items()}
