"""The project's own contestant: the candidate that the generate stage writes, bound as it is in a bundle."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernel_templates
from benchmarks.registry import Benchmark
from kernel_templates import tolerance
from kernel_templates.bind import Operator, bind
from kernel_templates.configs import Chooser
from kernel_templates.launch import quicken
from kernel_templates.loading import load_source
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.generate.specialize import specialise

TEMPLATES = Path(kernel_templates.__file__).parent


@cache
def source(spec: OperatorSpec) -> str:
    """The candidate's source."""
    return specialise(TEMPLATES / spec.family / "template.py", spec).source


@cache
def operator(spec: OperatorSpec, folder: Path) -> Operator:
    """The candidate as an op, with the family's configurations; its source stays in ``folder``."""
    module = load_source(source(spec), folder)
    quicken(module)
    chooser = Chooser.from_folder(TEMPLATES / spec.family / "configs", name=spec.words())
    return bind(module, name=f"{spec.family}_{spec.digest()}", choose_config=chooser)


def numerics(benchmark: Benchmark, tensors: dict[str, Tensor | None], run: Operator) -> dict[str, dict[str, float]]:
    """Error and limit of the output and of every gradient, against fp64 on the same device.

    Args:
        benchmark: at a size where fp64 fits.
        tensors: its inputs.
        run: the bound candidate.
    """
    spec: Any = benchmark.spec
    reference = family_module(spec.family, "reference")
    output = spec.outputs()[0].name
    names = [n for n, t in tensors.items() if t is not None and t.requires_grad]
    dtype = next(t.dtype for t in tensors.values() if t is not None and t.is_floating_point())

    def results(outputs: dict[str, Tensor], leaves: dict[str, Any], upstream: Tensor) -> dict[str, Tensor]:
        y = outputs[output]
        grads = torch.autograd.grad(y, [leaves[n] for n in names], upstream.to(y.dtype))
        return {output: y.detach(), **dict(zip(names, grads, strict=True))}

    def leaves(wide: torch.dtype) -> dict[str, Any]:
        def leaf(t: Tensor) -> Tensor:
            return t.detach().to(wide).requires_grad_(t.requires_grad) if t.is_floating_point() else t

        return {n: None if t is None else leaf(t) for n, t in tensors.items()}

    outputs = dict(zip((r.name for r in spec.outputs()), run(**tensors), strict=True))
    upstream = torch.randn(outputs[output].shape, device=outputs[output].device).to(dtype)
    found = results(outputs, tensors, upstream)
    exact_leaves, own_leaves = leaves(torch.float64), leaves(torch.float32)
    exact = results(reference.reference(exact_leaves, spec), exact_leaves, upstream)
    config = run.config(**tensors)
    own = results(reference.rounded_reference(own_leaves, spec, dtype, config), own_leaves, upstream)
    report = {}
    for name, expected in exact.items():
        own_error = tolerance.relative_rms(own[name], expected)
        limit = tolerance.limit(spec.family, dtype, own_error, gradient_of=None if name == output else name)
        report[name] = {"error": tolerance.relative_rms(found[name], expected), "limit": limit}
    return report
