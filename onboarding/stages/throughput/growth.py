"""The power of the length that a cost grows with. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(costs: Sequence[float]) -> float:
    """Of T, from the last three costs at doubled lengths: 1 is linear, 2 quadratic; constants do not count."""
    first, second = costs[-2] - costs[-3], costs[-1] - costs[-2]
    return math.log2(second / first) if first > 0 and second > 0 else 0.0
