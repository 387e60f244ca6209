"""Every kernel compiles for Hopper at the shipped configurations: no spills, shared memory enough, safe operands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Job = dict[str, Any]

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
ROOT = Path(__file__).parents[3]
LATENT: dict[str, Any] = {"key_dim": 512, "value_dim": 512, "rope": True, "rope_dim": 64, "top_k": 2048, "scale": 0.07}
KERNELS = {
    "_count_kernel",
    "_forward_kernel",
    "_delta_kernel",
    "_sink_kernel",
    "_slot_kernel",
    "_query_grad_kernel",
    "_key_grad_kernel",
    "_sum_kernel",
}


def _compiled(job: Job) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps([job])], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(found: list[dict[str, Any]], spilling: frozenset[str] = frozenset()) -> None:
    for kernel in found:
        assert kernel["stack"] == 0 or kernel["kernel"] in spilling, kernel
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel
        # such operands may be overwritten before they are read (ptxas before 13.3)
        assert kernel["registers_first"] == 0, kernel


def test_latent_attention_of_64_heads() -> None:
    found = _compiled({"spec": {"heads": 64, "sink": True, "target": True, **LATENT}, "case": [64, 8192]})
    assert {k["kernel"] for k in found} == KERNELS
    _check(found)
    for kernel in found:
        if kernel["kernel"] in ("_forward_kernel", "_slot_kernel", "_query_grad_kernel", "_key_grad_kernel"):
            # Hopper's matrix units, and no older instruction
            assert kernel["shared_first"] > 0, kernel
            assert kernel["mma_sync"] == 0, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        {"spec": {"heads": 128, **LATENT, "top_k": 2063}, "case": [64, 8192]},
        {"spec": {"heads": 64, "deterministic": False, **LATENT}, "case": [64, 8192]},
        {"spec": {"heads": 64, "key_dim": 256, "value_dim": 256, "top_k": 2048}, "case": [64, 8192]},
        {"spec": {"heads": 128, "key_dim": 256, "value_dim": 256, "top_k": 2048}, "case": [64, 8192]},
        {
            "spec": {
                "heads": 64, "kv_heads": 4, "key_dim": 128, "value_dim": 128, "separate": True, "top_k": 2048
            },
            "case": [64, 8192],
            "lists": 4,
        },
        {
            "spec": {"heads": 32, "kv_heads": 4, "key_dim": 192, "value_dim": 128, "separate": True, "top_k": 2048},
            "case": [64, 8192],
        },
        {"spec": {"heads": 6, "key_dim": 48, "value_dim": 48, "rope": True, "rope_dim": 8, "top_k": 9}, "case": [9, 7]},
        # offsets beyond 2^31
        {"spec": {"heads": 64, **LATENT}, "case": [64, 1 << 23]},
    ],
    ids=["128_heads", "atomics", "256", "256_128_heads", "by_key_head", "192_128", "tiny", "far"],
)  # fmt: skip
def test_other_sizes_and_flags(job: Job) -> None:
    far = job["case"][1] >= 1 << 22
    _check(_compiled(job), frozenset({"_forward_kernel", "_slot_kernel"}) if far else frozenset())


@pytest.mark.slow
def test_fp32() -> None:
    """Its products run on the plain units, from registers: at 512 columns they spill."""
    found = _compiled({"spec": {"heads": 64, "dtype": "float32", **LATENT}, "case": [64, 8192]})
    _check(found, frozenset({"_forward_kernel", "_slot_kernel"}))
