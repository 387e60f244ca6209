"""Search space of the short convolution."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.short_convolution.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 2, 8
"""Channels a thread: one load is 4 to 16 bytes of a 16-bit row; backward keeps about 4 W numbers for each."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations: channels of a block, rows of a strip, rows that are read ahead."""
    widest = max(64, 1 << max(sizes.get("channels", spec.channels) - 1, 0).bit_length())
    blocks = [
        (block, warps)
        for block, warps in itertools.product((64, 128, 256, 512), (1, 2, 4))
        if block <= widest and MIN_PER_THREAD <= block / (32 * warps) <= MAX_PER_THREAD
    ]
    return [
        {
            "forward_strip": strip,
            "forward_unroll": unroll,
            "forward_warps": warps,
            "backward_strip": 2 * strip,
            "backward_unroll": unroll,
            "backward_warps": warps,
            "block_channels": block,
        }
        for (block, warps), strip, unroll in itertools.product(blocks, (16, 32, 64), (2, 4, 8))
    ]
