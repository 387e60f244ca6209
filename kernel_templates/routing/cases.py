"""Shapes and logits on which a router is judged: ties, few and many experts, saturated scores, no rows."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.routing.reference import keys_of
from kernel_templates.routing.spec import Spec

REDRAWS = 30
"""How often rows with experts too close to order are drawn again; saturated scores stay so."""


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first; numbers of experts are whole groups of at least four."""
    each = max(4, -(-spec.top_k // spec.top_groups)) if spec.groups > 1 else 1
    step = spec.groups * each
    # one renormalised weight is 1 whatever the logits are: its gradient is exactly 0, and all that is left is rounding
    fewest = 2 if spec.renormalise else 1
    # the published number of experts has its place in both levels: a row of it is small
    fixed = [
        (rng.randint(60, 100), spec.experts, spec.top_k, "normal"),
        (rng.randint(10, 40), max(40 // step, 1) * step, 3, "ties"),
        (rng.randint(5, 40), max(100 // step, 1) * step, 2, "normal"),
        (1, max(17 // step, 1) * step, fewest, "normal"),
        (rng.randint(5, 40), max(64 // step, 1) * step, 4, "large"),
        (0, max(64 // step, 1) * step, 2, "normal"),
    ]
    if level == "compiled":
        fixed.insert(0, (4096 + rng.randint(1, 64), spec.experts, spec.top_k, "normal"))
    while len(fixed) < count:
        experts = step * rng.randint(1, max(1, 300 // step)) if spec.groups > 1 else rng.randint(2, 300)
        fixed.append((rng.randint(1, 60), experts, rng.randint(fewest, 8), rng.choice(("normal", "ties", "large"))))
    return [
        Case(
            name=f"{i}: {rows} rows, {top_k} of {experts} experts, {distribution}",
            dims={"rows": rows, "experts": experts, "top_k": top_k},
            dtype=spec.dtype,
            distribution=distribution,
        )
        for i, (rows, experts, wanted, distribution) in enumerate(fixed[:count])
        for top_k in [min(wanted, spec.top_groups * (experts // spec.groups))]
    ]


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {"rows": tokens, "experts": spec.experts, "top_k": spec.top_k}
    # no redraws of near ties: nobody compares these results
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype, distribution="ties")


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """Logits of about 1 (``large``: 8; ``ties``: quarters, so that many are equal), a bias, and K slots."""
    rows, experts, count = case.dims["rows"], case.dims["experts"], case.dims["top_k"]
    ties = case.distribution == "ties"

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=generator.device)

    def drawn(rows: int) -> Tensor:
        logits = normal(rows, experts) * (8.0 if case.distribution == "large" else 1.5)
        return ((4.0 * logits).round() / 4.0 if ties else logits).to(dtype)

    bias = normal(experts) * (0.0 if ties else 0.2) if spec.bias else None
    logits = drawn(rows)
    for _ in range(0 if ties else REDRAWS):
        close = too_close(logits, bias, count, spec)
        if not bool(close.any()):
            break
        logits[close] = drawn(int(close.sum()))
    tensors: dict[str, Tensor | None] = {"logits": logits.to(device)}
    if bias is not None:
        tensors["bias"] = bias.to(device)
    tensors["slots"] = torch.zeros(count, dtype=torch.int32, device=device)
    return tensors


def too_close(logits: Tensor, bias: Tensor | None, count: int, spec: Spec) -> Tensor:
    """Rows [N] in which two of the best experts lie so close that fp32 may order them either way.

    Equal logits of one bias are equal in every arithmetic, so they are close only in fp32, where the judge nudges them.
    """
    keys = keys_of(logits.double(), None if bias is None else bias.double(), spec)
    best = keys.topk(min(count + 1, keys.shape[-1]), dim=-1).values
    gaps = best[:, :-1] - best[:, 1:]
    least = 1e-5 * keys.abs().amax(-1, keepdim=True).clamp_min(1.0)
    equal = (gaps == 0.0) & (bias is None) & (logits.dtype != torch.float32)
    return ((gaps < least) & ~equal).any(-1)
