"""Search space of the norm kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.norm.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 64  # fp32 elements of one tile a thread holds; backward keeps about five tiles


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a hidden size, without those that starve threads or spill registers."""
    block = 1 << max(sizes.get("hidden", spec.hidden) - 1, 0).bit_length()
    tiles = [
        (rows, warps)
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32))
        if MIN_PER_THREAD <= rows * block / (32 * warps) <= MAX_PER_THREAD
    ]
    # rows of 16 KiB and more fill a program alone; the least bad tile is still a tile
    tiles = tiles or [(1, 32 if block >= 4096 else 1)]
    return [
        {
            "forward_rows": rows,
            "forward_warps": warps,
            "backward_rows": rows,
            "backward_warps": warps,
            "backward_programs": programs,
            "backward_stages": stages,
        }
        for (rows, warps), programs, stages in itertools.product(tiles, (264, 396, 528, 1056), (1, 2, 3))
    ]
