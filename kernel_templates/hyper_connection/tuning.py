"""Search space of the hyper-connection kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.hyper_connection.spec import Spec


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a width: tiles of the skinny product, of the passes over the streams, and of dx and dfn."""
    widest = 1 << max(sizes.get("hidden", spec.hidden) - 1, 0).bit_length()
    # Fewer than 64 tokens leave the large matrix instruction (two to five times slower), 128 columns spill in fp32. The
    # other two lists are what measurements left: few tokens of the product, long rows of the passes.
    mixes = [(64, 64, 4), (64, 128, 4)] if spec.dtype != "float32" else [(64, 64, 4)]
    streams = [(1, 1024, 4), (1, 2048, 4), (2, 1024, 4), (4, 512, 4)]
    gradients = [(16, 128, 4, 3), (16, 128, 4, 2), (16, 64, 4, 3), (32, 64, 4, 3), (32, 128, 4, 2), (64, 64, 4, 3)]
    return [
        {
            "mix_tokens": mix[0],
            "mix_columns": mix[1],
            "mix_warps": mix[2],
            "coefficient_tokens": 128,
            "coefficient_warps": 4,
            "stream_tokens": stream[0],
            "stream_columns": min(stream[1], widest),
            "stream_warps": stream[2],
            "gradient_tokens": gradient[0],
            "gradient_columns": min(gradient[1], widest),
            "gradient_splits": splits,
            "gradient_warps": gradient[2],
            "gradient_stages": gradient[3],
        }
        for mix, stream, gradient, splits in itertools.product(mixes, streams, gradients, (8, 16, 32))
    ]
