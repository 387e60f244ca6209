"""Search space of the linear attention kernels.

The kernels run one after the other, so their settings are independent: every configuration differs from the base in
one kernel only, and the tuner may combine the winners.
"""

from __future__ import annotations

from typing import Any

from kernel_templates.linear_attention.spec import Spec

SHARED_MEMORY = 227 * 1024  # bytes a program may have on sm_90
MAX_STATE_PER_THREAD = 128  # fp32 elements of the running state that a thread may hold in registers

BASE: dict[str, Any] = {
    "chunk": 64,
    "keep_states": 1,
    "keep_decayed": 1,
    "prepare_rows": 64,
    "prepare_bk": 32,
    "prepare_warps": 4,
    "prepare_registers": None,
    "gram_rows": 32,
    "gram_bk": 16,
    "gram_warps": 2,
    "gram_stages": 1,
    "gram_registers": None,
    "scan_bv": 32,
    "scan_output": 0,
    "scan_warps": 4,
    "scan_stages": 3,
    "output_rows": 64,
    "output_bv": 128,
    "output_warps": 4,
    "reverse_bv": 32,
    "reverse_warps": 4,
    "reverse_stages": 3,
    "score_rows": 64,
    "score_bv": 64,
    "score_warps": 8,
    "score_stages": 2,
    "score_registers": None,
    "gradient_rows": 64,
    "gradient_bk": 32,
    "gradient_slices": 1,
    "gradient_bv": 128,
    "gradient_warps": 8,
    "gradient_stages": 1,
    "gradient_registers": 128,
}

SCANS = [(bv, warps, stages) for bv in (16, 32, 64, 128) for warps in (4, 8) for stages in (2, 3)]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "prepare": [{"prepare_bk": bk, "prepare_warps": w} for bk, w in ((32, 4), (32, 8), (64, 4), (64, 8), (128, 16))],
    "gram": [{"gram_bk": bk, "gram_warps": w} for bk in (16, 32, 64) for w in (2, 4)],
    "scan": [{"scan_bv": bv, "scan_warps": w, "scan_stages": s} for bv, w, s in SCANS],
    "output": [{"output_bv": bv, "output_warps": w} for bv in (64, 128) for w in (4, 8)],
    "reverse": [{"reverse_bv": bv, "reverse_warps": w, "reverse_stages": s} for bv, w, s in SCANS],
    "score": [
        {"score_bv": bv, "score_warps": w, "score_stages": s} for bv in (64, 128) for w in (4, 8) for s in (1, 2)
    ],
    # with four warps gradient_kernel gives a wrong dg on an H200 with Triton 3.6
    "gradient": [
        {"gradient_bk": bk, "gradient_slices": slices, "gradient_stages": stages, "gradient_registers": registers}
        for bk, slices in ((32, 1), (32, 4), (64, 1), (64, 2))
        for stages in (1, 3)
        for registers in (None, 128)
    ],
}
# a decay per head or none has kernels of its own, and neither prepare nor score
HEAD_VARIANTS: dict[str, list[dict[str, Any]]] = {
    **{kernel: VARIANTS[kernel] for kernel in ("scan", "output", "reverse")},
    "gram": [{"gram_warps": w, "gram_registers": registers} for w in (4, 8) for registers in (None, 128)],
    "gradient": [
        {"gradient_bv": bv, "gradient_stages": stages, "gradient_registers": registers}
        for bv, stages in ((128, 1), (64, 1), (64, 2), (32, 2))
        for registers in (None, 128)
    ],
}


def space(spec: Spec, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """The base configuration and every fitting variation of one kernel."""
    element_bytes = sizes.get("element_bytes", 2)
    key_tile = 1 << max(sizes.get("key_dim", spec.key_dim) - 1, 15).bit_length()
    value_tile = 1 << max(sizes.get("value_dim", spec.value_dim) - 1, 15).bit_length()
    base = dict(BASE)
    if element_bytes == 4:  # everything is twice as large
        base.update(chunk=32, prepare_rows=32, output_rows=32, score_rows=32, gradient_rows=32)
        base.update(scan_bv=32, reverse_bv=32, output_bv=32, score_bv=32, gradient_bv=32)
        base.update(scan_warps=8, reverse_warps=8, scan_stages=1, reverse_stages=1, score_stages=1)
        base.update(prepare_warps=8, gram_warps=4, score_warps=4, gradient_warps=4, gradient_registers=None)
    for name in ("scan", "reverse"):
        while not fits(base, name, key_tile, element_bytes) and base[f"{name}_stages"] > 1:
            base[f"{name}_stages"] -= 1
        while not fits(base, name, key_tile, element_bytes) and base[f"{name}_bv"] > 16:
            base[f"{name}_bv"] //= 2
    if spec.decay != "channel":
        base.update(gram_warps=4, gradient_registers=None)
    found = [base]
    for kernel, variants in (VARIANTS if spec.decay == "channel" else HEAD_VARIANTS).items():
        for variant in variants:
            config = {**base, **variant}
            wide = variant.get(f"{kernel}_bv", 0) > value_tile or variant.get(f"{kernel}_bk", 0) > key_tile
            scan = kernel in ("scan", "reverse")
            if not wide and config not in found and (not scan or fits(config, kernel, key_tile, element_bytes)):
                found.append(config)
    return found


def fits(config: dict[str, Any], kernel: str, key_tile: int, element_bytes: int) -> bool:
    """Whether a scan's tiles fit into shared memory and its state into registers."""
    chunk, bv, stages, warps = (
        int(config[n]) for n in ("chunk", f"{kernel}_bv", f"{kernel}_stages", f"{kernel}_warps")
    )
    tiles = 3 if kernel == "reverse" else 2  # of keys; and one matrix of the chunk less
    loaded = tiles * chunk * key_tile + (tiles - 1) * chunk * chunk + chunk * bv
    made = (key_tile + chunk) * bv
    in_registers = key_tile * bv / (32 * warps)
    return (stages * loaded + made) * element_bytes <= SHARED_MEMORY and in_registers <= MAX_STATE_PER_THREAD
