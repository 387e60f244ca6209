"""Search space of the routing kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.routing.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 2, 32
"""Elements of a tile of scores that a thread holds."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a number of experts: rows of a program and warps."""
    width = 1 << max(sizes.get("experts", spec.experts) - 1, 0).bit_length()
    found = [
        {"rows": rows, "num_warps": warps}
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8))
        if MIN_PER_THREAD <= rows * width / (32 * warps) <= MAX_PER_THREAD
    ]
    return found or [{"rows": 1, "num_warps": 4}]
