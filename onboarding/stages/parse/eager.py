"""What an operator costs when no kernel serves it: the plain torch operators that transformers' own code runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from onboarding.architecture import OperatorUse
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.scans import loops
from onboarding.stages.parse.tracer import Operation, Trace, Tracer

_SHORT, _LONG = 128, 192
"""Two and three chunks of 64."""


def eager_costs(uses: list[OperatorUse], trace: Trace, owners: list[str], repeats: Callable[[Operation], int]) -> None:
    """Fill in the ``eager_*`` fields of each use.

    Operators that ran in the trace are added up. A linear attention ran as one node: its torch version is traced alone
    at two lengths and extended linearly (it loops over chunks). Experts have a fast torch path of their own, so what
    counts for them is their provider's measured efficiency, not their loop.
    """
    by_digest = {use.digest: use for use in uses}
    slopes: dict[str, tuple[float, float, float]] = {}
    for operation, owner in zip(trace.operations, owners, strict=True):
        use = by_digest.get(owner)
        if use is None:
            continue
        times = repeats(operation)
        if operation.leaf is None:
            use.eager_operators += times
            use.eager_flops += times * operation.flops
            use.eager_bytes += times * operation.bytes_moved
        elif operation.leaf.kind == "linear_attention" and operation.phase == "forward":
            if owner not in slopes:
                slopes[owner] = _fallback_slope(operation.leaf)
            count, flops, moved = slopes[owner]
            tokens = operation.shapes[0][0] * operation.shapes[0][1]
            use.eager_operators += round(times * count * tokens)
            use.eager_flops += times * flops * tokens
            use.eager_bytes += times * moved * tokens
        elif operation.leaf.kind == "attention":
            # every score is computed, and most are masked
            (b, h, t, d), (_, _, s, _), (*_, dv) = operation.leaf.shapes
            use.eager_operators += times
            use.eager_flops += times * 2.0 * b * h * t * s * (d + dv) * (1.0 if operation.phase == "forward" else 2.5)
        elif operation.leaf.kind == "state_space" and operation.phase == "forward":
            count, flops, moved = _state_space_cost(operation.leaf)
            use.eager_operators += round(times * count)
            use.eager_flops += times * flops
            use.eager_bytes += times * moved
        elif operation.leaf.kind == "short_convolution" and operation.phase == "forward":
            count, flops, moved = _convolution_cost(operation.leaf)
            use.eager_operators += round(times * count)
            use.eager_flops += times * flops
            use.eager_bytes += times * moved


def _fallback_slope(leaf: LeafCall) -> tuple[float, float, float]:
    """Operators, FLOPs and bytes a token of a marked function's torch version, forward and backward."""
    short, long = _fallback_cost(leaf, _SHORT), _fallback_cost(leaf, _LONG)
    count, flops, moved = ((b - a) / (_LONG - _SHORT) for a, b in zip(short, long, strict=True))
    return count, flops, moved


def _fallback_cost(leaf: LeafCall, tokens: int) -> tuple[int, float, float]:
    facts = leaf.facts
    marked: Any = facts["marked"]
    tracer = Tracer({})
    q, v = (facts["key_heads"], facts["key_dim"]), (facts["value_heads"], facts["value_dim"])
    gate = (facts["value_heads"], facts["key_dim"]) if facts["decay"] == "channel" else (facts["value_heads"],)
    heads = {"q": q, "k": q, "v": v, "g": gate, "beta": (facts["value_heads"],)}
    # meta tensors: these functions read no values, and without a fake mode tracing costs a third
    given = {
        name: torch.empty(1, tokens, *rest, dtype=_dtype(facts["dtypes"][name]), device="meta", requires_grad=True)
        for name, rest in heads.items()
    }
    named = {"q": "query", "k": "key", "v": "value"} if "query" in inspect.signature(marked.function).parameters else {}
    arguments = {named.get(name, name): tensor for name, tensor in given.items()}
    with quiet(), tracer:
        o, _ = marked.function(**arguments, use_qk_l2norm_in_kernel=facts["qk_l2norm"])
        tracer.phase = "backward"
        o.float().sum().backward()
    operations = tracer.trace.operations
    return len(operations), sum(op.flops for op in operations), sum(op.bytes_moved for op in operations)


def _state_space_cost(leaf: LeafCall) -> tuple[float, float, float]:
    """Operators, FLOPs and bytes of a marked state space scan's torch version, forward and backward.

    One that takes a step a token is traced at two short lengths and extended linearly.
    """
    if not loops(leaf.facts["marked"].function):
        return _state_space_at(leaf, None)
    tokens = leaf.shapes[0][1]
    short, long = _state_space_at(leaf, _SHORT), _state_space_at(leaf, _LONG)
    count, flops, moved = (a + (b - a) / (_LONG - _SHORT) * (tokens - _SHORT) for a, b in zip(short, long, strict=True))
    return count, flops, moved


def _state_space_at(leaf: LeafCall, tokens: int | None) -> tuple[float, float, float]:
    """The same at a length; None: the one that it was called with."""
    facts = leaf.facts
    given: dict[str, Any] = {"device": "meta", "requires_grad": True}
    shapes = [(shape[0], tokens or shape[1], *shape[2:]) for shape in leaf.shapes]
    x, dt, b, c = (torch.empty(shape, dtype=_dtype(facts["dtype"]), **given) for shape in shapes)
    heads = [torch.empty(facts["value_heads"], dtype=torch.float32, **given) for _ in range(3)]
    tracer = Tracer({})
    with quiet(), tracer:
        y = facts["marked"].function(
            x, dt, heads[0], b, c, chunk_size=256, D=heads[1], dt_bias=heads[2], dt_softplus=facts["dt_softplus"]
        )
        tracer.phase = "backward"
        y.backward(torch.empty_like(y))
    operations = tracer.trace.operations
    return len(operations), sum(op.flops for op in operations), sum(op.bytes_moved for op in operations)


def _convolution_cost(leaf: LeafCall) -> tuple[int, float, float]:
    """Operators, FLOPs and bytes of a marked causal filter's torch version, forward and backward."""
    facts = leaf.facts
    batch, tokens, channels = leaf.shapes[0]
    tracer = Tracer({})
    given: dict[str, Any] = {"dtype": _dtype(facts["dtype"]), "device": "meta", "requires_grad": True}
    x = torch.empty(batch, tokens, channels, **given).transpose(1, 2)
    weight = torch.empty(channels, facts["width"], **given)
    bias = torch.empty(channels, **given) if facts["bias"] else None
    with quiet(), tracer:
        y = facts["marked"].function(x, weight, bias=bias, activation=facts["activation"])
        tracer.phase = "backward"
        y.backward(torch.empty_like(y))
    operations = tracer.trace.operations
    return len(operations), sum(op.flops for op in operations), sum(op.bytes_moved for op in operations)


def _dtype(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype
