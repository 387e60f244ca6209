"""How costs grow with the sequence: two traces of the same model, one half as long as the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onboarding.architecture import Growth
from onboarding.stages.parse.tracer import Operation

SHORTEST = 64
"""Below this many tokens no shorter trace is made."""


def law(short: float, long: float, tokens: int) -> Growth:
    """The polynomial through the costs at ``tokens / 2`` and ``tokens``.

    Up to a doubling it is a constant and a linear part (a causal window's ramp is a constant), beyond that a linear and
    a quadratic one.

    Args:
        short: cost at half the tokens.
        long: cost at all of them.
        tokens: the longer length, even.
    """
    if long <= 2 * short:
        slope = 2 * (long - short) / tokens
        return Growth(constant=long - slope * tokens, linear=slope)
    square = (2 * long - 4 * short) / tokens**2
    return Growth(linear=(long - square * tokens**2) / tokens, quadratic=square)


def add(laws: Iterable[Growth]) -> Growth:
    """The sum of laws."""
    total = Growth()
    for one in laws:
        total.constant += one.constant
        total.linear += one.linear
        total.quadratic += one.quadratic
    return total


def scale(one: Growth, factor: float) -> Growth:
    """A law several times."""
    return Growth(constant=factor * one.constant, linear=factor * one.linear, quadratic=factor * one.quadratic)


def laws_of(short: Mapping[Any, float], long: Mapping[Any, float], tokens: int) -> dict[Any, Growth]:
    """The law of each key that the longer trace has."""
    return {key: law(short.get(key, 0.0), value, tokens) for key, value in long.items()}


def totals(operations: Iterable[Operation], key: Callable[[Operation], Any]) -> dict[Any, float]:
    """FLOPs added up by a key."""
    found: dict[Any, float] = defaultdict(float)
    for operation in operations:
        found[key(operation)] += operation.flops
    return dict(found)
