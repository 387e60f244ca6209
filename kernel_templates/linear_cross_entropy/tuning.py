"""Search space of the linear cross-entropy: memory against products first, then the sizes of tiles."""

from __future__ import annotations

from typing import Any

from kernel_templates.linear_cross_entropy.spec import Spec

ALL = 1 << 30
"""More classes than any vocabulary has."""

BASE: dict[str, Any] = {
    "rows": 8192,
    "classes": 3584,
    "kept": 0,
    "accumulate": "float32",
    "online_rows": 1664,
    "online_classes": 7680,
    "tile_classes": 8192,
    "tile_rows": 1,
    "values": 16,
    "finish_rows": 4,
    "finish_d": 512,
}
MOST_BLOCKS = 8
"""Blocks of rows whose dW is summed in the weight's dtype: each rounds the sum, and 16 reach the family's cap."""
VALUES = 64
"""fp32 logits that a thread of a row's program can hold beside what it computes of them."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations that hold a row of a slice in one program's registers.

    A space says nothing of memory: what a configuration takes is in the README, and the tuner measures it.
    """
    rows, vocabulary = max(sizes.get("rows", 8192), 1), sizes.get("vocabulary", spec.vocabulary)
    variants: list[dict[str, Any]] = [{}]
    if spec.frozen and not spec.label_smoothing:
        variants += [{"online_rows": count, "online_classes": classes}
                     for count in (512, 1024, 1664, 2048, 4096, 8192)
                     for classes in (2560, 4096, 7680, 16384)]  # fmt: skip
    else:
        # all rows at once: dW is one sum, four products less the kept share of the vocabulary
        variants += [{"rows": rows, "classes": classes, "kept": vocabulary * share // 8}
                     for classes in (2048, 3584, 4096, 8192) for share in (0, 1, 2, 4, 8)]  # fmt: skip
        # few rows and the whole vocabulary: three products, and a sum of sums
        variants += [{"rows": count, "classes": classes, "kept": ALL, "accumulate": kind}
                     for count in (512, 1024, 2048, 4096) if count < rows
                     for classes in (8192, 16384) for kind in ("float32", "storage")
                     if kind == "float32" or -(-rows // count) <= MOST_BLOCKS]  # fmt: skip
    variants += [{"values": values} for values in (32, 64)]
    found: list[dict[str, Any]] = []
    for variant in variants:
        config = BASE | variant
        if config not in found and fits(config):
            found.append(config)
    return found


def fits(config: dict[str, Any]) -> bool:
    """Whether a row of the widest slice fits the registers of a program's 16 warps."""
    widest = max(config["classes"], config["online_classes"])
    return bool(config["tile_rows"] * widest <= 16 * 32 * VALUES and config["accumulate"] in ("float32", "storage"))
