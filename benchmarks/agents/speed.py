"""Time of an accepted kernel against torch.compile on the reference, on the GPU at hand, at the published sizes.

The candidate was accepted by the judge and the suite's references are our own: both run in this process.
"""

from __future__ import annotations

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

ROUNDS = 20
FLUSH_BYTES = 256 * 2**20


def compare(source: str, spec: NovelSpec) -> dict[str, float]:
    """Median milliseconds of one forward and backward: the kernel, and torch.compile on the reference."""
    sizes = {name: dim.most or dim.full for name, dim in spec.call.dims.items()}
    generator = torch.Generator("cuda").manual_seed(0)
    case = Case(name="published", dims=sizes, dtype=spec.dtype)
    tensors = novel.FAMILY.make_tensors(spec, case, generator, getattr(torch, spec.dtype), "cuda")
    given = {n: t for n, t in tensors.items() if t is not None}
    for role in spec.inputs():
        given[role.name].requires_grad_(role.differentiable)
    with tempfile.TemporaryDirectory() as folder:
        configs = novel.configs_for(spec, source.encode(), Path(folder) / "configs")
        kernel = bind(
            load_source(source, Path(folder)),
            name=spec.name.replace(" ", "_"),
            choose_config=Chooser.from_folder(configs),
        )
        reference = torch.compile(entry_point(load_source(spec.source, Path(folder)), spec.call))
        with torch.device("cuda"):
            times = {
                "kernel_ms": _median(lambda: kernel(**given), given),
                "compiled_ms": _median(lambda: _outputs(reference(given)), given),
            }
    return times | {"ratio": times["compiled_ms"] / times["kernel_ms"]}


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result.values() if isinstance(result, dict) else result)


def _median(run: Callable[[], tuple[Tensor, ...]], given: dict[str, Tensor]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    leaves = [t for t in given.values() if t.requires_grad]
    times = []
    for turn in range(ROUNDS + 3):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        outputs = [o for o in run() if o.requires_grad]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(float(begin.elapsed_time(end)))
    return statistics.median(times)
