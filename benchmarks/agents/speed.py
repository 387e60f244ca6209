"""Time of an accepted kernel against torch.compile on the reference, on the GPU at hand, at the published sizes.

The candidate was accepted by the judge and the suite's references are our own: both run in this process. A reference
that loops over time in Python is timed eager: torch.compile would unroll every step.
"""

from __future__ import annotations

import ast
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_templates.bind import bind
from kernel_templates.case import Case
from kernel_templates.configs import Chooser
from kernel_templates.loading import load_source
from kernel_templates.novel import NovelSpec
from onboarding.stages.judge import novel
from onboarding.stages.judge.novel_child import entry_point

ROUNDS, ROUNDS_OF_A_LOOP = 20, 2
FLUSH_BYTES = 256 * 2**20
Run = Callable[[], tuple[Tensor, ...]]


def compare(source: str, spec: NovelSpec) -> dict[str, Any]:
    """Median milliseconds of one forward and backward: the kernel, and the reference."""
    return Ready(source, spec).measure()


class Ready:
    """A kernel and its reference, both compiled and run once."""

    def __init__(self, source: str, spec: NovelSpec) -> None:
        sizes = {name: dim.most or dim.full for name, dim in spec.call.dims.items()}
        generator = torch.Generator("cuda").manual_seed(0)
        case = Case(name="published", dims=sizes, dtype=spec.dtype)
        tensors = novel.FAMILY.make_tensors(spec, case, generator, getattr(torch, spec.dtype), "cuda")
        self.given = {n: t for n, t in tensors.items() if t is not None}
        for role in spec.inputs():
            self.given[role.name].requires_grad_(role.differentiable)
        self.loops = any(isinstance(node, ast.For | ast.While) for node in ast.walk(ast.parse(spec.source)))
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        kernel = bind(
            load_source(source, folder),
            name=spec.name.replace(" ", "_"),
            choose_config=Chooser.from_folder(novel.configs_for(spec, source.encode(), folder / "configs")),
        )
        plain = entry_point(load_source(spec.source, folder), spec.call)
        reference = plain if self.loops else torch.compile(plain)
        self.runs: dict[str, Run] = {
            "kernel_ms": lambda: kernel(**self.given),
            "reference_ms": lambda: _outputs(reference(self.given)),
        }
        self.step("kernel_ms")
        self.step("reference_ms")
        torch.cuda.synchronize()

    def step(self, name: str) -> None:
        """One forward and backward."""
        leaves = [t for t in self.given.values() if t.requires_grad]
        with torch.device("cuda"):
            outputs = [o for o in self.runs[name]() if o.requires_grad]
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])

    def measure(self) -> dict[str, Any]:
        """Median milliseconds of each, their rounds interleaved."""
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        times: dict[str, list[float]] = {name: [] for name in self.runs}
        for turn in range(ROUNDS + 3):
            for name in self.runs:
                if name == "reference_ms" and self.loops and turn >= ROUNDS_OF_A_LOOP:
                    continue
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                self.step(name)
                end.record()
                torch.cuda.synchronize()
                if turn >= 3 or (self.loops and name == "reference_ms"):
                    times[name].append(float(begin.elapsed_time(end)))
        found = {name: statistics.median(each) for name, each in times.items()}
        peer = "eager, a loop over time" if self.loops else "torch.compile"
        return found | {"ratio": found["reference_ms"] / found["kernel_ms"], "peer": peer}


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result.values() if isinstance(result, dict) else result)
