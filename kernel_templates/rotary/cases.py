"""Shapes and inputs on which rotary embedding is judged: partial and whole heads, one and many heads, no tokens."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.rotary.spec import Spec

SIZES = ((64, 64), (48, 32), (100, 20), (18, 18), (128, 64), (6, 2))
"""Head size and how much of it turns; odd ones on purpose."""


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full size."""
    whole = (spec.head_dim, spec.rotary_dim) if level == "compiled" or spec.head_dim <= 128 else (64, 32)
    # every axis of a multimodal table has its pairs
    least = 2 * (spec.temporal + spec.height + 1) if spec.temporal else 2
    sizes_of = [(max(size, least), max(turned, least)) for size, turned in SIZES]
    whole = (max(whole[0], least), max(whole[1], least))
    fixed = [
        (2, rng.randint(20, 40), 4, 2, whole, "scaled"),
        (1, rng.randint(5, 20), 3, 1, rng.choice(sizes_of), "normal"),
        (3, rng.randint(2, 9), 1, 1, rng.choice(sizes_of), "normal"),
        (1, 1, 5, 5, rng.choice(sizes_of), "normal"),
        (2, rng.randint(8, 20), 2, 2, rng.choice(sizes_of), "large"),
        (2, 0, 2, 1, whole, "normal"),
    ]
    if level == "compiled":
        fixed.insert(0, (1, 2048 + rng.randint(1, 64), spec.heads, spec.key_heads, whole, "scaled"))
    while len(fixed) < count:
        sizes = (rng.randint(1, 3), rng.randint(1, 30), rng.randint(1, 5), rng.randint(1, 3))
        fixed.append((*sizes, rng.choice(sizes_of), rng.choice(("normal", "large", "scaled"))))
    return [
        Case(
            name=f"{i}: {batch} x {tokens} tokens, {heads} + {keys} heads of {size}, {turned} turned, {distribution}",
            dims={
                "batch": batch,
                "tokens": tokens,
                "heads": heads,
                "key_heads": keys,
                "head_dim": size,
                "rotary_dim": turned,
            },
            dtype=spec.dtype,
            distribution=distribution,
            options={"shared": i % 2 == 0},
        )
        for i, (batch, tokens, heads, keys, (size, turned), distribution) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {
        "batch": 1,
        "tokens": tokens,
        "heads": spec.heads,
        "key_heads": spec.key_heads,
        "head_dim": spec.head_dim,
        "rotary_dim": spec.rotary_dim,
    }
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Normal heads; cos and sin of unrelated angles by position and channel, for one sequence or for all of them."""
    d = case.dims

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    batch = 1 if case.options.get("shared") else d["batch"]
    shape = (
        *((3,) if spec.temporal else ()),
        batch,
        d["tokens"],
        d["rotary_dim"] // (2 if spec.angles == "half" else 1),
    )
    angle = 3.0 * normal(*shape)
    scale = 1.3 if case.distribution == "scaled" else 1.0
    size = 30.0 if case.distribution == "large" else 1.0
    tensors: dict[str, Tensor | None] = {"q": size * normal(d["batch"], d["tokens"], d["heads"], d["head_dim"])}
    if spec.keys:
        tensors["k"] = normal(d["batch"], d["tokens"], d["key_heads"], d["head_dim"])
    tensors |= {"cos": scale * angle.cos(), "sin": scale * angle.sin()}
    if spec.norm:
        for name in ("q", "k") if spec.keys else ("q",):
            tensors[f"{name}_weight"] = 0.3 * normal(d["head_dim"]) + (0.0 if spec.offset else 1.0)
    return {n: None if t is None else t.to(device=device, dtype=dtype) for n, t in tensors.items()}
