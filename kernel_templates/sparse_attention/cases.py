"""Shapes, lists and values on which sparse attention is judged: odd widths, gaps, empty rows, documents, duplicates."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.sparse_attention.spec import Spec

LISTS = ("causal", "gaps", "documents", "duplicates", "tail", "random", "empty_rows")
"""``causal``: ascending, packed left, fewer keys than slots in early rows; ``gaps``: -1 and numbers past the keys in
between; ``documents``: keys of the query's own document; ``duplicates``: drawn with replacement; ``tail``: the last
keys of a row follow those that were selected; ``random``: no order, any key; ``empty_rows``: a third has none.
"""

# odd on purpose: no multiple of a tile, or one past it
ODD_COLUMNS = (16, 20, 33, 48, 60, 96)
ODD_SLOTS = (1, 7, 31, 33, 47, 65, 79)


class _Sizes(NamedTuple):
    tokens: int
    keys: int
    groups: int
    heads: int
    """Query heads a key head."""
    columns: int
    value: int
    rope: int
    slots: int
    lists: str
    by_group: bool = False


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; ``compiled`` ones include the published widths and list."""
    group = spec.heads // spec.kv_heads
    heads = min(group, 8)
    several = 1 if spec.kv_heads == 1 else 2
    many = [
        _Sizes(rng.randint(17, 24), 40, several, heads, 48, 24, 16, 33, "gaps"),
        _Sizes(rng.randint(20, 30), 30, several, 3, 20, 20, 8, 47, "causal"),
        _Sizes(rng.randint(9, 15), 70, 2, 2, 33, 17, 12, rng.choice(ODD_SLOTS), "random", True),
        _Sizes(rng.randint(12, 20), 50, 1, rng.choice((1, 17)), 60, 31, 16, 7, "duplicates"),
        _Sizes(rng.randint(20, 30), 30, several, heads, 16, 16, 16, 18, "documents"),
        _Sizes(0, 9, several, 2, 16, 16, 16, 8, "causal"),
        _Sizes(rng.randint(10, 20), 35, 1, heads, 96, 64, 32, 65, "empty_rows"),
        _Sizes(rng.randint(15, 25), 25, several, 4, 48, 32, 16, 15, "tail"),
    ]
    if level == "compiled":
        rope = spec.rope_dim or 64
        own = (spec.key_dim, spec.value_dim, rope)
        many[1:1] = [
            _Sizes(100 + rng.randint(0, 50), 700, several, group, *own, 333, "gaps"),
            _Sizes(60 + rng.randint(0, 30), 3000, 1, group, *own, spec.top_k, "random"),
            _Sizes(200 + rng.randint(0, 50), 250, several, group, *own, 257, "causal"),
        ]
    while len(many) < count:
        columns, groups = rng.choice(ODD_COLUMNS), rng.randint(1, several)
        many.append(
            _Sizes(
                rng.randint(4, 30),
                rng.randint(1, 60),
                groups,
                rng.randint(1, 9),
                columns,
                rng.choice(ODD_COLUMNS),
                rng.choice((8, 16)),
                rng.choice(ODD_SLOTS),
                rng.choice(LISTS),
                rng.random() < 0.3,
            )
        )
    return [
        Case(
            name=f"{i}: {c.tokens} queries, {c.keys} keys, {c.groups} x {c.heads} heads of {c.columns}, "
            f"{c.slots} slots, {c.lists}{', by key head' if c.by_group else ''}",
            dims=dict(zip(c._fields[:8], c[:8], strict=True)),
            dtype=spec.dtype,
            distribution=c.lists,
            options={"by_group": c.by_group},
        )
        for i, c in enumerate(many[:count])
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    heads, value = spec.heads // spec.kv_heads, spec.value_dim
    sizes = _Sizes(
        tokens, spec.keys or tokens, spec.kv_heads, heads, spec.key_dim, value, spec.rope_dim, spec.top_k, "causal"
    )
    return Case(
        name=f"{tokens} tokens",
        dims=dict(zip(sizes._fields[:8], sizes[:8], strict=True)),
        dtype=spec.dtype,
        distribution="causal",
        options={"by_group": False},
    )


def lists(case: Case, generator: torch.Generator) -> Tensor:
    """index [T, K] or [T, G, K] int32 by the case's distribution; -1, or a number past the keys, stands for none."""
    tokens, keys, slots = (case.dims[n] for n in ("tokens", "keys", "slots"))
    rows = tokens * (case.dims["groups"] if case.options["by_group"] else 1)
    device, kind = generator.device, case.distribution
    query = torch.arange(tokens, device=device).repeat_interleave(rows // max(tokens, 1))
    key = torch.arange(keys, device=device)
    # queries are the last ones of the sequence
    own = query + max(keys - tokens, 0)
    visible = key[None] <= own[:, None]
    if kind == "documents":
        length = max(keys // 3, 1)
        visible &= key[None] // length == (own // length)[:, None]
    elif kind in ("random", "duplicates"):
        visible = torch.ones_like(visible)
    elif kind == "empty_rows":
        visible[::3] = False
    if kind == "duplicates":
        index = torch.randint(0, keys, (rows, slots), generator=generator, device=device)
    else:
        score = torch.rand(rows, keys, generator=generator, device=device)
        if kind == "tail":
            score = torch.where(key[None] > own[:, None] - 3, 2.0, score)
        order = score.masked_fill(~visible, -1.0).argsort(1, descending=True)[:, :slots]
        index = torch.where(visible.gather(1, order), order, -1)
        index = torch.nn.functional.pad(index, (0, slots - index.shape[1]), value=-1)
        if kind != "random":
            # ascending, those that are none behind
            index = torch.where(index < 0, keys, index).sort(1).values
            index = torch.where(index == keys, -1, index)
    if kind == "gaps":
        gone = torch.rand(index.shape, generator=generator, device=device) < 0.25
        wrong = torch.where(torch.rand(index.shape, generator=generator, device=device) < 0.5, -1, keys + 5)
        index = torch.where(gone, wrong, index)
    if case.options["by_group"]:
        index = index.view(tokens, case.dims["groups"], slots)
    return index.to(torch.int32)


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Inputs of ``spec``: values of unit variance, keys and queries such that scores have about unit variance."""
    d = case.dims
    tokens, keys, groups = d["tokens"], d["keys"], d["groups"]
    heads = groups * d["heads"]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    # whatever the spec's scale is, scores spread over a few units
    width = d["columns"] + (d["rope"] if spec.rope else 0)
    spread = 1.0 if spec.scale is None else (spec.scale**-1 * width**-0.5)
    tensors: dict[str, Tensor | None] = {
        "q": spread * normal(tokens, heads, d["columns"]),
        "k": normal(keys, groups, d["columns"]),
    }
    if spec.separate:
        tensors["v"] = normal(keys, groups, d["value"])
    if spec.rope:
        tensors["q_rope"] = spread * normal(tokens, heads, d["rope"])
        tensors["k_rope"] = normal(keys, groups, d["rope"])
    found = {n: None if t is None else t.to(dtype) for n, t in tensors.items()}
    found["index"] = lists(case, generator)
    if spec.sink:
        found["sink"] = (0.5 + normal(heads)).to(dtype)
    order = [role.name for role in spec.inputs()]
    return {n: None if found[n] is None else found[n].to(device) for n in order}  # type: ignore[union-attr]
