"""Search space of the gated activation kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.gated_activation.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 32
"""Elements of a tile that a thread holds: fewer waste a 16-byte load, more spill in backward."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a width, without those that starve threads or spill registers."""
    width = 1 << max(sizes.get("width", spec.width) - 1, 0).bit_length()
    found = [
        {"rows": rows, "block": block, "num_warps": warps}
        for rows, block, warps in itertools.product((1, 2, 4, 8, 16, 32), (64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8))
        if MIN_PER_THREAD <= rows * block / (32 * warps) <= MAX_PER_THREAD and block <= width
    ]
    return found or [{"rows": 32, "block": 64, "num_warps": 4}]
