"""Search space of the indexer's kernels: each kernel's tiles around a base."""

from __future__ import annotations

from typing import Any

from kernel_templates.indexer.spec import Spec
from kernel_templates.spec import DTYPE_BYTES

SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper."""
ACCUMULATOR = 160
"""fp32 accumulators a thread can hold beside weights and addresses; 128 keys x 256 columns at 8 warps is 128."""

BASE: dict[str, Any] = {
    "score_columns": 256,
    "score_keys": 128,
    "score_split": 4096,
    "score_warps": 8,
    "score_stages": 3,
    "workspace_kib": 131072,
    "candidates": 4096,
    "sample": 2048,
    "scan_block": 2048,
    "narrow_warps": 8,
    "select_warps": 8,
    "partial_kib": 262144,
    "mark_block": 1024,
    "mark_warps": 4,
    "offset_keys": 256,
    "gradient_slots": 32,
    "gradient_warps": 4,
    "gradient_stages": 2,
    "add_rows": 32,
    "add_warps": 1,
    "pool_warps": 4,
    "pool_programs": 528,
    "objective_rows": 1,
    "objective_block": 1024,
    "objective_warps": 4,
}
SINGLE: dict[str, Any] = {
    "score_columns": 64,
    "score_keys": 32,
    "score_stages": 1,
    "gradient_slots": 16,
    "gradient_warps": 8,
    "gradient_stages": 1,
}
"""fp32 products run on the plain units: small tiles."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations, without those that exceed shared memory or registers."""
    bytes_each = DTYPE_BYTES[spec.dtype]
    base = BASE | (SINGLE if bytes_each == 4 else {})
    variants: list[dict[str, Any]] = [{}]
    if spec.operation == "objective":
        for block in (512, 1024, 2048, 4096):
            variants += [{"objective_block": block, "objective_warps": warps} for warps in (2, 4, 8)]
    elif spec.operation == "compression":
        for warps in (1, 2, 4, 8):
            variants += [{"pool_warps": warps, "pool_programs": programs} for programs in (132, 264, 528, 1056)]
    else:
        for columns, keys, warps in (
            (256, 128, 8),
            (128, 128, 8),
            (128, 128, 4),
            (256, 64, 4),
            (128, 256, 8),
            (64, 128, 4),
        ):
            tile = {"score_columns": columns, "score_keys": keys, "score_warps": warps}
            variants += [tile | {"score_stages": stages} for stages in (2, 3, 4)]
        variants += [{"score_split": split} for split in (2048, 8192, 16384)]
        variants += [{"workspace_kib": kib} for kib in (32768, 65536, 262144)]
        for candidates in (4096, 8192):
            for warps in (4, 8, 16):
                variants.append({"candidates": candidates, "select_warps": warps})
        for block in (1024, 2048, 4096):
            variants += [{"scan_block": block, "narrow_warps": warps} for warps in (4, 8)]
        variants += [{"sample": sample} for sample in (1024, 4096)]
        for slots, warps in ((32, 4), (64, 8), (32, 8), (128, 8)):
            variants += [{"gradient_slots": slots, "gradient_warps": warps, "gradient_stages": s} for s in (1, 2, 3)]
        variants += [{"partial_kib": kib} for kib in (65536, 131072, 524288)]
        variants += [{"add_rows": rows, "add_warps": warps} for rows, warps in ((16, 1), (64, 2), (64, 4))]
    found: list[dict[str, Any]] = []
    for variant in variants:
        config = base | variant
        if config not in found and fits(config, bytes_each, sizes.get("head_dim", spec.head_dim)):
            found.append(config)
    return found


def fits(config: dict[str, Any], bytes_each: int, head_dim: int) -> bool:
    """Whether the products' operands fit shared memory, their sums the registers, and a choice its candidates."""
    columns, keys, slots = config["score_columns"], config["score_keys"], config["gradient_slots"]
    score = (columns + keys * config["score_stages"]) * head_dim * bytes_each
    threads = 32 * config["score_warps"]
    fit: bool = (
        score <= SHARED_MEMORY
        and columns * keys / threads <= ACCUMULATOR
        and slots * head_dim / (32 * config["gradient_warps"]) <= 64
        and config["sample"] <= config["candidates"]
    )
    return fit
