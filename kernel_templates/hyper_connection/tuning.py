"""Search space of the hyper-connection kernels."""

from __future__ import annotations

import itertools
from typing import Any

from kernel_templates.hyper_connection.spec import Spec


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for a width: tiles of the skinny product, of the passes over the streams, and of dx and dfn."""
    widest = 1 << max(sizes.get("hidden", spec.hidden) - 1, 0).bit_length()
    # fewer than 64 tokens leave the large matrix instruction: twice to five times slower
    mixes = [(64, s, w) for s, w in itertools.product((64, 128), (4, 8))]
    streams = [(t, c, w) for t, c, w in itertools.product((1, 2, 4), (512, 1024, 2048), (4, 8)) if t * c <= 4096]
    gradients = [
        (t, c, w, s)
        for t, c, w, s in itertools.product((16, 32, 64), (64, 128), (4, 8), (2, 3))
        if 1024 <= t * c <= 64 * 64
    ]
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
