"""Search space of the sparse attention kernels: each kernel's tiles are varied alone around a sound base."""

from __future__ import annotations

from typing import Any

from kernel_templates.sparse_attention.spec import Spec
from kernel_templates.spec import DTYPE_BYTES

SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper."""
ACCUMULATOR = 128
"""fp32 accumulators a thread can hold beside the addresses of a gather."""
ROPE = 64
"""Columns of a rotary part; what is not known from the sizes is assumed."""


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for heads a key head and columns, without those that exceed shared memory or registers."""
    bytes_each = DTYPE_BYTES[spec.dtype]
    heads = sizes.get("heads", spec.heads // spec.kv_heads)
    columns = _power(sizes.get("columns", spec.key_dim))
    base = _base(heads, columns, bytes_each)
    variants: list[dict[str, Any]] = [{}]
    for block_h in (16, 32, 64):
        for warps in (4, 8):
            variants.append({"block_h": block_h, "forward_warps": warps})
            variants.append({"block_h": block_h, "forward_warps": warps, "score_warps": warps})
    # every other stage fetches the lists
    variants += [{"forward_stages": stages} for stages in (2, 3, 5)]
    variants += [{"score_stages": stages, "score_warps": warps} for stages in (1, 3) for warps in (4, 8)]
    for block in (64, 128, 256):
        variants += [{"query_columns": block, "query_stages": stages} for stages in (3, 5, 7)]
        variants += [{"query_columns": block, "query_warps": 8}]
        variants += [{"key_columns": block, "key_slots": slots} for slots in (64, 128)]
        variants += [{"key_columns": block, "key_slots": 128, "key_warps": 8}]
        variants += [{"key_columns": block, "key_stages": stages} for stages in (2, 3)]
    variants += [{"forward_split": 1, "weight_slots": slots, "weight_stages": s} for slots, s in ((64, 2), (32, 3))]
    for entries in (16, 32, 64):
        variants += [{"sum_entries": entries, "sum_columns": block} for block in (128, 256, 512)]
    variants += [{"workspace_kib": mib * 1024} for mib in (256, 1024, 3072)]
    found: list[dict[str, Any]] = []
    for variant in variants:
        config = base | variant
        if config not in found and fits(config, columns, bytes_each):
            found.append(config)
    return found


def fits(config: dict[str, Any], columns: int, bytes_each: int) -> bool:
    """Whether the resident queries and the buffers of gathered keys fit, and the accumulators their registers."""
    width = columns + ROPE
    heads = config["block_h"]
    forward = (
        heads * width
        + (1 + config["forward_stages"] // 2) * config["forward_slots"] * width
        + config["forward_slots"] * heads
    )
    score = heads * (width + columns) + (1 + config["score_stages"] // 2) * config["score_slots"] * width
    query = (1 + config["query_stages"] // 2) * config["query_slots"] * (heads + config["query_columns"])
    key = 2 * config["key_heads"] * (config["key_columns"] + config["key_stages"] * config["key_slots"])
    weight = heads * width + (1 + config["weight_stages"] // 2) * config["weight_slots"] * width
    held = {
        "forward": columns * heads,
        "query": heads * config["query_columns"],
        "key": config["key_slots"] * config["key_columns"],
    }
    return all(elements * bytes_each <= SHARED_MEMORY for elements in (forward, score, query, key, weight)) and all(
        elements / (32 * config[f"{kernel}_warps"]) <= ACCUMULATOR for kernel, elements in held.items()
    )


def _base(heads: int, columns: int, bytes_each: int) -> dict[str, Any]:
    """A sound configuration; wide keys leave room for two buffers in forward and one in the pass over P and dS."""
    block_h = min(max(_power(heads), 16), 64)
    wide = columns > 256
    base = {
        "block_h": block_h,
        "count_slots": 1024,
        "forward_split": 0,
        "forward_slots": 64,
        "forward_columns": 256,
        "forward_warps": 8 if wide else 4,
        "forward_stages": 2 if wide else 3,
        "weight_slots": 64,
        "weight_warps": 4,
        "weight_stages": 2,
        "score_slots": 32 if block_h == 64 and not wide else 64,
        "score_warps": 4,
        "score_stages": 1 if wide else 3,
        "query_slots": 64,
        "query_columns": 128,
        "query_warps": 4,
        "query_stages": 5,
        "key_slots": 64,
        "key_columns": 128,
        "key_heads": block_h,
        "key_warps": 4,
        "key_stages": 4,
        "sum_entries": 64,
        "sum_columns": min(columns, 512),
        "sum_warps": 4,
        "delta_rows": 8,
        "workspace_kib": 1536 * 1024,
    }
    if bytes_each == 4:  # products in fp32 run on the plain units, from registers
        small = {
            "block_h": 16,
            "forward_slots": 16,
            "weight_slots": 16,
            "score_slots": 16,
            "query_slots": 16,
            "key_slots": 16,
        }
        small |= {"query_columns": 64, "key_columns": 64, "key_heads": 16}
        base |= (
            small | {"forward_warps": 4} | {f"{kernel}_stages": 1 for kernel in ("forward", "score", "query", "key")}
        )
    return base


def _power(size: int) -> int:
    """The power of two that holds a size, at least 16."""
    return max(16, 1 << max(size - 1, 0).bit_length())
