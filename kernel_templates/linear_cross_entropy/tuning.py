"""Search space of the linear cross-entropy: the way to the gradient first, then each kernel's tiles around a base."""

from __future__ import annotations

from typing import Any

from kernel_templates.linear_cross_entropy.spec import Spec
from kernel_templates.spec import DTYPE_BYTES

SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper."""
ACCUMULATOR = 160
"""fp32 accumulators a thread can hold beside addresses and epilogue; 128 x 256 at 8 warps is 128."""

BASE: dict[str, Any] = {
    "rows": 8192,
    "vocabulary": 4096,
    "accumulate": "float32",
    "dx_slices": 1,
    "group": 8,
    "logits_m": 128,
    "logits_n": 128,
    "logits_k": 64,
    "logits_warps": 8,
    "logits_stages": 3,
    "dx_m": 128,
    "dx_n": 256,
    "dx_k": 64,
    "dx_warps": 8,
    "dx_stages": 3,
    "dw_m": 128,
    "dw_n": 256,
    "dw_k": 64,
    "dw_warps": 8,
    "dw_stages": 3,
    "merge_rows": 32,
    "merge_tiles": 32,
    "scale_rows": 16,
    "finish_rows": 4,
    "finish_d": 512,
    "bias_rows": 64,
    "bias_n": 64,
}
SINGLE: dict[str, Any] = {
    f"{kernel}_{part}": size
    for kernel in ("logits", "dx", "dw")
    for part, size in (("m", 64), ("n", 64), ("k", 32), ("warps", 4), ("stages", 2))
}
"""fp32 products run on the plain units: small tiles."""
WIDEST = 1 << 30
"""More classes than any vocabulary has: the chunk is all of it."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations, without those that exceed shared memory or registers."""
    bytes_each = DTYPE_BYTES[spec.dtype]
    base = BASE | (SINGLE if bytes_each == 4 else {})
    rows = max(sizes.get("rows", 8192), 1)
    variants: list[dict[str, Any]] = [{}]
    # the whole vocabulary for few rows at a time: three products instead of four, at C V bytes and a sum of sums
    for count, slices in ((384, 4), (512, 3), (1024, 2), (1792, 1), (4096, 1)):
        if count <= rows and spec.reduction in ("mean", "sum"):
            variants += [{"rows": count, "vocabulary": WIDEST, "dx_slices": slices, "accumulate": kind}
                         for kind in (("float32",) if spec.frozen else ("float32", "storage"))]  # fmt: skip
    for count, chunk in ((1792, 12032), (1664, 15360), (2048, 8192), (4096, 8192), (8192, 2048), (8192, 8192)):
        variants.append({"rows": count, "vocabulary": chunk})
    for kernel in ("logits", "dx", "dw"):
        for m, n in ((64, 128), (128, 128), (128, 256), (256, 128)):
            for stages in (3, 4):
                variants.append({f"{kernel}_m": m, f"{kernel}_n": n, f"{kernel}_stages": stages})
    variants += [{"group": group} for group in (4, 16)]
    found: list[dict[str, Any]] = []
    for variant in variants:
        config = base | variant
        if config not in found and fits(config, bytes_each):
            found.append(config)
    return found


def fits(config: dict[str, Any], bytes_each: int) -> bool:
    """Whether every product's operand tiles fit shared memory and its accumulator the registers.

    Tiles of logits write the zeros that tiles of dx read.
    """
    return config["logits_n"] % config["dx_k"] == 0 and all(
        (config[f"{kernel}_m"] + config[f"{kernel}_n"])
        * config[f"{kernel}_k"]
        * bytes_each
        * config[f"{kernel}_stages"]
        <= SHARED_MEMORY
        and config[f"{kernel}_m"] * config[f"{kernel}_n"] / (32 * config[f"{kernel}_warps"]) <= ACCUMULATOR
        for kernel in ("logits", "dx", "dw")
    )
