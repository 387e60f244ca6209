"""Search space of the experts kernels: each kernel's tiles are varied alone around a sound base."""

from __future__ import annotations

from typing import Any

from kernel_templates.moe.spec import Spec
from kernel_templates.spec import DTYPE_BYTES

SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper."""
ACCUMULATOR = 160
"""fp32 accumulators a thread can hold beside addresses and epilogue; 128 x 256 at 8 warps is 128."""

# kernels that do not depend on the matrix tiles
ROUTING = {"route_block": 128, "tile_block": 32, "score_block": 128, "score_d": 64, "bias_r": 32, "bias_n": 64}


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Configurations for mean rows an expert, without those that exceed shared memory or registers."""
    bytes_each = DTYPE_BYTES[spec.dtype]
    base = _base(sizes.get("rows", 256), 64 if bytes_each == 2 else 32)
    variants: list[dict[str, Any]] = [{}]
    for n in (64, 128):
        for stages in (3, 4):
            variants.append({"up_n": n, "up_stages": stages})
    for n in (64, 128, 256):
        for stages in (3, 4):
            variants.append({"rows_n": n, "rows_stages": stages})
    for p, q in ((64, 128), (128, 128), (128, 256), (256, 128)):
        # rows of a gathered operand are loaded after their numbers: twice the stages for as many tiles in flight
        for r, stages, copy in ((32, 7, False), (64, 5, False), (32, 6, True), (64, 4, True)):
            variants.append({"weight_p": p, "weight_q": q, "weight_r": r, "weight_stages": stages, "weight_copy": copy})
    for warps, stages in ((4, 3), (4, 4), (8, 4), (8, 5)):
        variants.append({"weight_more": 64, "weight_warps": warps, "weight_stages": stages, "weight_copy": True})
        variants.append({"weight_warps": warps, "weight_stages": stages, "weight_copy": True})
    for block_m in (32, 64, 128):
        warps = 4 if block_m < 128 else 8
        variants.append(
            {"block_m": block_m, "tail_m": min(block_m, 64), "up_n": 64, "up_warps": warps}
            | {"rows_n": 128, "rows_warps": warps}
        )
    variants += [{"combine_t": t, "combine_d": d} for t, d in ((1, 1024), (2, 512), (4, 256))]
    variants += [{"spread_r": r, "spread_d": d} for r, d in ((2, 1024), (8, 256))]
    variants += [{"grad_r": r, "grad_n": n} for r, n in ((1, 1024), (2, 512), (8, 256))]
    found: list[dict[str, Any]] = []
    for variant in variants:
        config = base | variant
        if config not in found and fits(config, bytes_each):
            found.append(config)
    return found


def fits(config: dict[str, Any], bytes_each: int) -> bool:
    """Whether every matrix kernel's operand tiles fit shared memory and its accumulator the registers."""
    m = config["block_m"]
    tiles = {
        "up": (m, 2 * config["up_n"], config["up_k"]),
        "rows": (m, config["rows_n"], config["rows_k"]),
        "weight": (config["weight_p"], config["weight_q"] + config["weight_more"], config["weight_r"]),
    }
    buffers = {kernel: config[f"{kernel}_stages"] for kernel in tiles}
    if not config["weight_copy"]:
        # every other stage only fetches the numbers of the rows
        buffers["weight"] = (buffers["weight"] - 1) // 2 + 1
    return all(
        (rows + columns) * depth * bytes_each * buffers[kernel] <= SHARED_MEMORY
        and rows * columns / (32 * config[f"{kernel}_warps"]) <= ACCUMULATOR
        for kernel, (rows, columns, depth) in tiles.items()
    )


def _base(rows: int, depth: int) -> dict[str, Any]:
    """A sound configuration for a mean number of rows an expert; ``depth`` is the K step of the products."""
    if rows < 24:
        m, n, warps = 16, 64, 4
    elif rows < 96:
        m, n, warps = 64, 64, 4
    else:
        m, n, warps = 128, 64, 8
    return {
        "block_m": m,
        # half a tile for an expert's last rows, if the matrix units still run at full rate
        "tail_m": 64 if m == 128 else m,
        "up_n": n,
        "up_k": depth,
        "up_warps": warps,
        "up_stages": 3,
        "rows_n": 128,
        "rows_k": depth,
        "rows_warps": warps,
        "rows_stages": 3,
        "grad_r": 4,
        "grad_n": 512,
        "weight_p": 128,
        "weight_q": 128,
        "weight_more": 0,
        "weight_r": 32,
        "weight_warps": 8,
        "weight_stages": 7,
        "weight_copy": False,
        "combine_t": 1,
        "combine_d": 1024,
        "spread_r": 1,
        "spread_d": 1024,
        **ROUTING,
    }
