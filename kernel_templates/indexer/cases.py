"""Shapes and inputs on which an indexer is judged: ties, signed zeros, documents, pools, few keys, long rows."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.indexer.reference import all_scores, seen, undecided
from kernel_templates.indexer.spec import Spec

VISIBLE = ("causal", "documents", "pools", "later", "any")
"""How begin and end are drawn: ``later``: queries are the last of the keys; ``any``: any ranges, empty too."""
REDRAWS = 30
"""How often queries whose last choice hangs on rounding are drawn again."""

Sizes = tuple[int, int, int, int, int, int, str, str]


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``interpreted`` ones are small, ``compiled`` ones include full heads."""
    if spec.operation == "objective":
        return _objectives(spec, rng, count, level)
    if spec.operation == "compression":
        return _compressions(spec, rng, count)
    heads, dim = (spec.heads, spec.head_dim) if level == "compiled" else (min(spec.heads, 8), min(spec.head_dim, 64))
    # batch, queries, keys, heads, dim, slots, visible, distribution
    fixed: list[Sizes] = [
        (1, rng.randint(40, 60), 0, heads, dim, 16, "causal", "normal"),
        (1, rng.randint(30, 50), rng.randint(70, 90), heads, dim, 12, "later", "ties"),
        (2, rng.randint(20, 30), 0, rng.choice((3, 5)), 32, 7, "documents", "normal"),
        (1, rng.randint(33, 60), rng.randint(100, 200), 2, 16, 20, "any", "zeros"),
        (1, rng.randint(5, 20), rng.randint(3, 9), 4, dim, 24, "any", "normal"),
        (2, rng.randint(16, 40), rng.randint(3, 9), 1, 16, 2, "pools", "signed"),
        (1, 0, 5, 2, 16, 3, "any", "normal"),
        (1, rng.randint(5, 9), rng.randint(300, 400), heads, dim, 40, "later", "normal"),
    ]
    if level == "compiled":
        top_k = min(spec.top_k, 2048)
        fixed.insert(
            0, (1, rng.randint(300, 400), 3 * top_k + rng.randint(1, 64), heads, dim, top_k, "later", "normal")
        )
        fixed.insert(1, (1, rng.randint(100, 200), rng.randint(9000, 12000), heads, dim, 512, "later", "ties"))
        fixed.insert(2, (1, rng.randint(500, 600), 0, heads, dim, top_k, "causal", "normal"))
    while len(fixed) < count:
        size = (
            rng.randint(1, 2),
            rng.randint(1, 60),
            rng.randint(1, 120),
            rng.randint(1, 9),
            rng.choice((16, 32, 60, 64)),
        )
        kinds = (rng.choice(("later", "any", "pools")), rng.choice(("normal", "ties", "signed", "zeros")))
        fixed.append((*size, rng.randint(1, 40), *kinds))
    return [
        Case(
            name=f"{i}: {b} x {s} queries, {t or s} keys, {h} heads x {d}, {k} slots, {visible}, {distribution}",
            dims={"batch": b, "queries": s, "keys": t or s, "heads": h, "head_dim": d, "slots": k},
            dtype=spec.dtype,
            distribution=distribution,
            options={"visible": visible},
        )
        for i, (b, s, t, h, d, k, visible, distribution) in enumerate(fixed[:count])
    ]


def _objectives(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    width = spec.top_k if level == "compiled" else min(spec.top_k, 200)
    fixed = [
        (1, rng.randint(30, 60), width, "normal"),
        (2, rng.randint(5, 20), rng.choice((1, 7, 129)), "normal"),
        (1, 1, 33, "sharp"),
        (1, rng.randint(5, 20), 64, "empty"),
        (0, 3, 8, "normal"),
    ]
    while len(fixed) < count:
        kind = rng.choice(("normal", "sharp", "empty"))
        fixed.append((rng.randint(1, 3), rng.randint(1, 40), rng.randint(1, 300), kind))
    return [
        Case(
            name=f"{i}: {b} x {s} rows of {k} slots, {kind}",
            dims={"batch": b, "queries": s, "slots": k},
            dtype=spec.dtype,
            distribution=kind,
        )
        for i, (b, s, k, kind) in enumerate(fixed[:count])
    ]


def _compressions(spec: Spec, rng: random.Random, count: int) -> list[Case]:
    fixed = [
        (1, rng.randint(100, 200), spec.pool, min(spec.head_dim, 128), "normal"),
        (2, rng.randint(30, 60), 3, 40, "sharp"),
        (1, rng.randint(2, 9), 1, 16, "normal"),
        (3, rng.randint(20, 40), 5, 7, "normal"),
        (1, 3, 8, 16, "normal"),
    ]
    while len(fixed) < count:
        size = (rng.randint(1, 3), rng.randint(20, 90), rng.randint(2, 17), rng.choice((16, 33, 64, 128)))
        fixed.append((*size, rng.choice(("normal", "sharp"))))
    return [
        Case(
            name=f"{i}: {b} x {t} tokens, pools of {r}, {d} channels, {kind}",
            dims={"batch": b, "tokens": t, "pool": r, "head_dim": d},
            dtype=spec.dtype,
            distribution=kind,
        )
        for i, (b, t, r, d, kind) in enumerate(fixed[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning: one causal sequence, nobody looks for ties."""
    dims = {"batch": 1, "queries": tokens, "keys": tokens, "heads": spec.heads, "head_dim": spec.head_dim}
    if spec.operation == "compression":
        dims = {"batch": 1, "tokens": tokens, "pool": spec.pool, "head_dim": spec.head_dim}
    else:
        dims["slots"] = min(spec.top_k, tokens)
    return Case(
        name=f"{tokens} tokens",
        dims=dims,
        dtype=spec.dtype,
        distribution="plain",
        options={"visible": "causal"},
    )


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """q, k, weights in ``dtype``; ``ties`` and ``signed`` are small integers, of which many scores are equal.

    ``signed`` has negative weights only, so that relu's zeros are negative; ``zeros`` has mostly zero products;
    ``plain`` may have scores that fp32 cannot tell apart: for timing only.
    """
    if spec.operation == "objective":
        return _objective_tensors(case, generator, device)
    if spec.operation == "compression":
        return _compression_tensors(case, generator, dtype, device)
    d = case.dims
    shape = (d["batch"], d["queries"], d["heads"])
    whole = case.distribution in ("ties", "signed")

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    def drawn(*size: int) -> Tensor:
        return normal(*size).round().clamp(-2, 2) if whole else normal(*size)

    q, k = drawn(*shape, d["head_dim"]), drawn(d["batch"], d["keys"], d["head_dim"])
    weights = drawn(*shape)
    if case.distribution == "signed":
        weights = -weights.abs()
    if case.distribution == "zeros":
        k[:, ::3] = 0.0
        weights = -weights.abs()
    tensors: dict[str, Tensor | None] = {"q": q.to(dtype), "k": k.to(dtype)}
    if spec.weighted:
        tensors["weights"] = weights.to(dtype)
    begin, end = _visible(case, generator)
    tensors |= {"begin": begin, "end": end, "slots": torch.zeros(d["slots"], dtype=torch.int32, device=begin.device)}
    for _ in range(0 if whole or case.distribution == "plain" or q.numel() == 0 else REDRAWS):
        wide = {n: None if t is None else t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        visible = seen(wide, d["keys"])
        again = undecided(all_scores(wide, spec), visible, d["slots"], wide, spec).any(-1)
        if not bool(again.any()):
            break
        given = tensors["q"]
        assert given is not None
        given[again] = normal(int(again.sum()), *given.shape[2:]).to(dtype)
    return {n: None if t is None else t.to(device) for n, t in tensors.items()}


def _visible(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """begin and end [B, S] int32."""
    batch, queries, keys = (case.dims[n] for n in ("batch", "queries", "keys"))
    at = torch.arange(queries, device=generator.device).expand(batch, queries)
    zero = torch.zeros_like(at)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (batch, queries), generator=generator, device=generator.device)

    kind = case.options["visible"]
    if kind == "any":
        begin, end = draw(keys + 1), draw(keys + 1)
    elif kind == "documents":
        # documents of one third of the queries
        begin, end = at // max(queries // 3, 1) * max(queries // 3, 1), at + 1
    elif kind == "pools":
        begin, end = zero, (at + 1) // 4
    else:
        begin, end = zero, at + 1 + (keys - queries if kind == "later" else 0)
    return begin.clamp(0, keys).to(torch.int32).contiguous(), end.clamp(0, keys).to(torch.int32).contiguous()


def _objective_tensors(case: Case, generator: torch.Generator, device: torch.device | str) -> dict[str, Tensor | None]:
    """Scores and targets of some heads' sum; ``empty`` has rows without slots and rows without a target."""
    shape = (case.dims["batch"], case.dims["queries"])
    slots = case.dims["slots"]
    scores = torch.randn(*shape, slots, generator=generator, device=generator.device)
    target = torch.randn(*shape, slots, generator=generator, device=generator.device)
    scores *= 6.0 if case.distribution == "sharp" else 1.0
    target = 16.0 * (target * (4.0 if case.distribution == "sharp" else 1.0)).softmax(-1)
    count = torch.randint(1, slots + 1, shape, generator=generator, device=generator.device)
    if case.distribution == "empty":
        count[:, ::3] = 0
        target[:, 1::3] = 0.0
    count = count.to(torch.int32)
    return {n: t.to(device) for n, t in {"scores": scores, "target": target, "count": count}.items()}


def _compression_tensors(
    case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Pools from some token on, each right after the other, with a gap; the last ones do not fit into the sequence."""
    batch, tokens, pool, dim = (case.dims[n] for n in ("batch", "tokens", "pool", "head_dim"))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    first = torch.randint(0, 3, (batch, 1), generator=generator, device=generator.device)
    number = torch.arange(tokens // pool + 1, device=first.device)
    start = first + pool * number + (number > 2)
    start[:, 1::5] = -1
    sharp = 4.0 if case.distribution == "sharp" else 1.0
    tensors = {"k": normal(batch, tokens, dim), "gate": sharp * normal(batch, tokens, dim), "bias": normal(pool, dim)}
    found: dict[str, Tensor | None] = {n: t.to(device=device, dtype=dtype) for n, t in tensors.items()}
    return found | {"start": start.int().to(device)}
