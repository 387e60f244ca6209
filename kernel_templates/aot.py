"""Ahead-of-time compilation of a candidate's kernels for a GPU that need not be here.

The candidate's host functions run once under ``FakeTensorMode`` at real sizes, with every kernel launch recorded
instead of made; each recorded launch is then compiled with its own signature, constants and options, and the machine
code's registers, spills and shared memory are read. That happens in a process of its own, because a process that
interprets kernels cannot compile them::

    compile_all([Job(source=path, tensors={"x": ((4096, 2304), "bfloat16"), ...}, config=config)])

Host functions must not look at values; the launch recorder serves anyone else who wants to know what would run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_templates.recording import TensorShapes, compile_launch, record_launches

TARGET_ARCH = 90
"""Compute capability of H100 and H200."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to compile: a candidate's file, the shapes it is called with, and the configuration."""

    source: Path
    tensors: TensorShapes
    config: dict[str, Any]
    label: str = ""
    alone: bool = False
    """Compile what every gradient alone asks for, too: a kernel may leave out what others need."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One compiled launch."""

    kernel: str
    label: str
    phase: str
    """``forward`` or ``backward``."""
    grid: tuple[int, ...]
    registers: int
    """32-bit registers a thread; 255 is the limit."""
    spill_bytes: int
    """Bytes of local memory a thread."""
    shared_bytes: int
    """Shared memory a program, static and dynamic."""
    num_warps: int
    seconds: float
    register_operands: int = 0
    """wgmma instructions whose left operand comes from registers: before ptxas 13.3 it may be overwritten too early."""
    error: str = ""
    """Why it does not compile; then the numbers are 0."""


def compile_all(jobs: Sequence[Job], arch: int = TARGET_ARCH, timeout: float = 600.0) -> list[KernelReport]:
    """Compile every kernel that the jobs launch, forward and backward; equal launches once.

    Raises:
        RuntimeError: the process failed; kernels that do not compile are reports with an ``error``.
    """
    request = {"arch": arch, "jobs": [{**asdict(job), "source": str(job.source)} for job in jobs]}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    )
    done = subprocess.run(
        [sys.executable, "-m", "kernel_templates.aot"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{done.stderr[-4000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return [KernelReport(**{**row, "grid": tuple(row["grid"])}) for row in rows]


def resources(compiled: Any) -> tuple[int, int]:
    """Registers and local bytes a thread, as the machine code states them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], max(found.get("STACK", 0), found.get("LOCAL", 0))


def register_operands(ptx: str) -> int:
    """How many wgmma of a kernel take their left operand from registers: it stands in braces, as the sums do."""
    return len(re.findall(r"wgmma\.mma_async[^;]*?\{[^}]*\}\s*,\s*\{", ptx, re.DOTALL))


def _compile_jobs(request: dict[str, Any]) -> list[KernelReport]:
    from kernel_templates.loading import load_module

    reports: list[KernelReport] = []
    seen: set[str] = set()
    for job in request["jobs"]:
        module = load_module(Path(job["source"]))
        tensors = {n: None if t is None else (tuple(t[0]), t[1]) for n, t in job["tensors"].items()}
        phases = record_launches(module, tensors, job["config"], job.get("alone", False))
        for phase, launches in phases.items():
            for launch in launches:
                started = time.perf_counter()
                name = launch.kernel.fn.__name__
                grid = tuple(int(g) for g in launch.grid)
                facts = {"kernel": name, "label": job["label"], "phase": phase, "grid": grid}
                try:
                    compiled = compile_launch(launch, request["arch"])
                    key = f"{name} {compiled.hash}"
                    if key in seen:
                        continue
                    seen.add(key)
                    registers, spill = resources(compiled)
                    reports.append(
                        KernelReport(
                            **facts,
                            registers=registers,
                            spill_bytes=spill,
                            shared_bytes=compiled.metadata.shared,
                            num_warps=compiled.metadata.num_warps,
                            seconds=time.perf_counter() - started,
                            register_operands=register_operands(compiled.asm["ptx"]),
                        )
                    )
                except Exception as problem:
                    reports.append(
                        KernelReport(
                            **facts,
                            registers=0,
                            spill_bytes=0,
                            shared_bytes=0,
                            num_warps=0,
                            seconds=time.perf_counter() - started,
                            error=f"{type(problem).__name__}: {problem}"[:2000],
                        )
                    )
    return reports


if __name__ == "__main__":
    print(json.dumps([asdict(report) for report in _compile_jobs(json.load(sys.stdin))]))
