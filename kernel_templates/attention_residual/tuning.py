"""Search space of the attention residual kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.attention_residual.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 64
"""fp32 elements of one tile that a thread holds; forward keeps about three tiles, backward five."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a hidden size, without those that starve threads or spill registers."""
    block = 1 << max(sizes.get("hidden", spec.hidden) - 1, 0).bit_length()
    tiles = [
        (rows, warps)
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32))
        if MIN_PER_THREAD <= rows * block / (32 * warps) <= MAX_PER_THREAD
    ]
    tiles = tiles or [(1, 32 if block >= 4096 else 1)]
    return [
        {
            "forward_rows": rows,
            "forward_warps": warps,
            "backward_rows": rows,
            "backward_warps": warps,
            "backward_programs": programs,
            "backward_sources": sources,
        }
        for (rows, warps), programs, sources in itertools.product(tiles, (132, 264, 528), (3, 5, 9))
    ]
