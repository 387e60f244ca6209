"""The confined side of alignment: builds the twin, runs it, writes raw tensors and losses. Judges nothing.

    python -m onboarding.stages.align.child JOB.json

The job file holds one :class:`Job`. Each of its runs writes ``<name>.safetensors`` (outputs and gradients of one
step) and ``<name>.json`` (losses, what ran on kernels) into the working directory, and prints one JSON line an
optimizer step.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from onboarding.stages.align.widen import widened
from onboarding.twin import TwinPlan, build
from onboarding.twin.layers import decoder_layers
from runtime.data import byte_batches, standard_library_sources
from runtime.loop import language_model_loss, train


class Run(BaseModel):
    """One pass of the twin."""

    name: str
    dtype: str
    """Of computation: ``float64``, ``float32`` or ``bfloat16``."""
    nudge: int = 0
    """Seed of a change of every parameter by less than one unit in its last place; 0 for none."""
    only: list[str] | None = None
    """Digests of the bundle's kernels to put in; None for the model's own code."""


class Job(BaseModel):
    """What the parent asks for."""

    plan: str
    """A twin plan as JSON."""
    weights: str
    """Dtype in which the initial values are rounded: every run starts from the same numbers."""
    device: str
    seed: int
    batch: int
    """Sequences of the layer comparison; training uses one, for time's sake."""
    sequence_length: int
    steps: int
    """Optimizer steps after the layer comparison; 0 for none."""
    lr: float
    bundle: str | None = None
    code: str | None = None
    """Folder of the definition's own code, where that serves the model."""
    runs: list[Run]


def main(arguments: list[str]) -> int:
    """Run the job file named on the command line."""
    job = Job.model_validate_json(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    if job.code is not None:
        from onboarding.custom_code.load import install

        install(Path(job.code))
    for run in job.runs:
        execute(job, run, Path.cwd())
    return 0


def execute(job: Job, run: Run, folder: Path) -> None:
    """Do one run and write its files to ``folder``."""
    from safetensors.torch import save_file

    plan = TwinPlan.from_json(job.plan)
    model = _model(plan, job, run)
    applied = _apply(job, run, model)
    paths = standard_library_sources()
    with ExitStack() as modes:
        if run.dtype == "float64":
            modes.enter_context(widened())
        ids = next(byte_batches(paths, job.batch, job.sequence_length, job.seed)).to(job.device)
        tensors = one_step(model, ids)
        save_file(tensors, folder / f"{run.name}.safetensors")
        _say(run.name, step=0, loss=0.0)
        batches = byte_batches(paths, 1, job.sequence_length, job.seed + 1)
        losses = train(
            model,
            islice(batches, job.steps),
            steps=job.steps,
            lr=job.lr,
            on_step=lambda step, loss: _say(run.name, step=step, loss=loss),
        )
    report = {
        "losses": losses,
        "ran": applied.ran() if applied else {},
        "skipped": applied.skipped if applied else {},
        "fallbacks": applied.fallbacks if applied else {},
    }
    (folder / f"{run.name}.json").write_text(json.dumps(report))


def _say(run: str, **data: Any) -> None:
    print(json.dumps({"run": run, **data}), flush=True)


def _model(plan: TwinPlan, job: Job, run: Run) -> nn.Module:
    model = build(plan, dtype=getattr(torch, job.weights), seed=job.seed)
    if run.dtype != job.weights:
        model = model.to(getattr(torch, run.dtype))
    if run.nudge:
        _nudge(model, run.nudge)
    return model.to(job.device)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    """Change every parameter by up to one unit in the last place: a rounding that could have fallen otherwise."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float32) * 2 - 1
        parameter.mul_((1 + noise.double() * torch.finfo(parameter.dtype).eps).to(parameter.device))


def _apply(job: Job, run: Run, model: nn.Module) -> Any:
    if run.only is None:
        return None
    assert job.bundle is not None
    sys.path.insert(0, job.bundle)
    apply = importlib.import_module("apply")  # the bundle's own copy: what is aligned is what is shipped
    return apply.apply(model, verify=False, only=run.only)


def one_step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Outputs and parameter gradients of one step, by name: ``output.<module>``, ``gradient.<parameter>``."""
    with recorded(model) as outputs:
        loss = language_model_loss(model, ids)
    loss.backward()  # type: ignore[no-untyped-call]
    tensors = {f"output.{name}": value for name, value in outputs.items()}
    tensors["output.loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"gradient.{name}"] = parameter.grad
    model.zero_grad(set_to_none=True)
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of the blocks, of their parts and of the head, and the experts that tokens went to."""
    prefix, layers = decoder_layers(model)
    outputs: dict[str, Tensor] = {}
    handles = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(first, Tensor) and first.is_floating_point():
                outputs[name] = first.detach()

        return hook

    def keep_choice(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            choices = [a for a in args if isinstance(a, Tensor) and not a.is_floating_point()]
            if choices:
                outputs[f"{name}.choice"] = choices[0].detach().sort(-1).values

        return hook

    for index, layer in enumerate(layers):
        name = f"{prefix}.{index}"
        handles.append(layer.register_forward_hook(keep(name)))
        for child_name, child in layer.named_children():
            handles.append(child.register_forward_hook(keep(f"{name}.{child_name}")))
        for inner, module in layer.named_modules():
            if inner.endswith("experts") and not isinstance(module, nn.ModuleList):
                handles.append(module.register_forward_hook(keep_choice(f"{name}.{inner}")))
    head: Any = getattr(model, "lm_head", None)
    if head is not None:
        handles.append(head.register_forward_hook(keep("lm_head")))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
