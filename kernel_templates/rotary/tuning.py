"""Search space of the rotary kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.rotary.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 32
"""Elements of a tile of heads that a thread holds."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a head size: tokens of a tile, heads that share its angles, warps, programs of backward."""
    width = 1 << max(sizes.get("head_dim", spec.head_dim) - 1, 0).bit_length()
    found = [
        {"tokens": tokens, "heads": heads, "num_warps": warps, "programs": programs}
        for tokens, heads, warps, programs in itertools.product(
            (8, 16, 32, 64), (1, 4, 8), (2, 4, 8), (264, 1056) if spec.norm else (264,)
        )
        if MIN_PER_THREAD <= tokens * width / (32 * warps) <= MAX_PER_THREAD
    ]
    return found or [{"tokens": 8, "heads": 1, "num_warps": 4, "programs": 264}]
