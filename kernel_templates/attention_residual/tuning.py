"""Search space of the attention residual kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.attention_residual.spec import Spec

MIN_PER_THREAD, MAX_PER_THREAD = 4, 64
"""fp32 elements of one row that a thread holds; backward keeps about four rows, and those read ahead as stored."""
SOURCES = (4, 12)
"""Sources whose rows are read at once."""
PROGRAMS = (132, 264, 528, 1056, 2112)


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a hidden size, without those that starve threads or spill registers."""
    block = 1 << max(sizes.get("hidden", spec.hidden) - 1, 0).bit_length()
    fitting = [w for w in (1, 2, 4, 8, 16, 32) if MIN_PER_THREAD <= block / (32 * w) <= MAX_PER_THREAD]
    return [
        {
            "forward_warps": warps,
            "forward_sources": sources,
            "backward_warps": warps,
            "backward_sources": sources,
            "backward_programs": programs,
        }
        for warps, sources, programs in itertools.product(fitting or [32 if block > 4096 else 1], SOURCES, PROGRAMS)
    ]
