"""Search space of the short convolution."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.short_convolution.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 32  # fp32 elements of one tile a thread holds; backward keeps about four tiles


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations without those that starve threads, spill registers, or leave lanes without a channel."""
    widest = 1 << max(sizes.get("channels", spec.channels) - 1, 0).bit_length()
    tiles = [
        (rows, block, warps)
        for rows, block, warps in itertools.product((8, 16, 32, 64), (32, 64, 128, 256), (1, 2, 4, 8))
        if block <= max(widest, 32) and MIN_PER_THREAD <= rows * block / (32 * warps) <= MAX_PER_THREAD
    ]
    return [
        {
            "forward_rows": rows,
            "forward_warps": warps,
            "backward_rows": rows,
            "backward_warps": warps,
            "backward_programs": programs,
            "block_channels": block,
        }
        for (rows, block, warps), programs in itertools.product(tiles, (16, 64, 256))
    ]
