"""Every kernel compiles for Hopper at the shipped configurations, without spills and within shared memory."""

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
ALL = ["x", "scores", "gate_up", "down"]
GPT_OSS: dict[str, Any] = {
    "limit": 7.0,
    "alpha": 1.702,
    "up_offset": 1.0,
    "bias": True,
    "transposed": True,
    "gate_up_layout": "interleaved",
}
KERNELS = {
    "_count_kernel",
    "_rank_kernel",
    "_tile_kernel",
    "_up_kernel",
    "_rows_kernel",
    "_combine_kernel",
    "_hidden_grad_kernel",
    "_score_grad_kernel",
    "_spread_kernel",
    "_weight_grad_kernel",
}


def _job(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    needs: list[str] = ALL,
    dtype: str = "bfloat16",
    **flags: Any,
) -> Job:
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    case = [tokens, top_k, experts, hidden, intermediate]
    return {"spec": {"dtype": dtype, **sizes, **flags}, "case": case, "needs": needs}


def _compiled(jobs: list[Job]) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(jobs)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check(found: list[dict[str, Any]]) -> None:
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 227 * 1024, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= 65536, kernel


def test_published_kimi_linear() -> None:
    found = _compiled([_job(8192, 8, 256, 2304, 1024)])
    assert {k["kernel"] for k in found} == KERNELS
    _check(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        _job(8192, 8, 256, 2304, 1024, needs=["x"]),
        _job(16384, 8, 128, 2048, 768),
        _job(4096, 8, 288, 4096, 2048),
        _job(8192, 16, 896, 1024, 512),
        _job(8192, 4, 32, 2880, 2880, needs=[*ALL, "gate_up_bias", "down_bias"], **GPT_OSS),
        _job(512, 2, 8, 64, 32),
        _job(40, 2, 8, 1025, 60),
        _job(64, 8, 64, 2048, 1024),
        _job(8192, 8, 256, 2304, 1024, activation="gelu_tanh", transposed=True),
        _job(8192, 8, 256, 2304, 1024, activation="gelu"),
        _job(300, 2, 8, 256, 128, dtype="float32"),
    ],
    ids=["frozen", "qwen3", "e288", "e896", "gpt_oss", "small", "odd", "few_rows", "gelu_tanh", "gelu", "fp32"],
)
def test_other_sizes_and_flags(job: Job) -> None:
    _check(_compiled([job]))
