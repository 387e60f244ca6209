"""Runs reference and candidate in confined children, and compares what they wrote. This side judges."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_templates.tolerance import FLOORS
from onboarding.custom_code.definition import CONFINED
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Outcome, run_module
from onboarding.sandbox.files import read_left_behind
from onboarding.stages.align import compare, curves
from onboarding.stages.align.child import Job, Run
from onboarding.stages.align.result import LayerError

LIMITS = {
    "cpu": Limits(wall_s=1800.0, memory_bytes=6 * 2**30),
    # CUDA's own threads and host buffers come on top
    "cuda": Limits(wall_s=1800.0, memory_bytes=32 * 2**30, processes=512, scratch_bytes=8 * 2**30),
}
Report = Callable[[str, int, float], None]
"""Called with (run, step, loss) while a child works."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the model's own code computes."""

    high: dict[str, Tensor]
    low: list[dict[str, Tensor]]
    losses: list[list[float]]
    """Of the runs in the candidate's precision, the unchanged one first."""
    band: list[float]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What the model computes with kernels in it, measured against the reference."""

    failure: str = ""
    """Why it did not run to its end; empty if it did."""
    rows: list[LayerError] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ran: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def layers_fail(self) -> bool:
        """A tensor is out of tolerance, or there are none."""
        return bool(self.failure) or any(row.share > 1 for row in self.rows)

    def fails(self, reference: Reference) -> bool:
        """Out of tolerance in a layer, or out of the band at some step."""
        steps = len(self.losses)
        return self.layers_fail or not curves.inside(self.losses, reference.losses[0][:steps], reference.band[:steps])


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The fixed conditions of one alignment."""

    job: Job
    """Without runs."""
    low: str
    high: str
    nudges: int
    letters: Sequence[str]
    scratch: Path
    unsafe: bool
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reference(self, report: Report) -> Reference:
        """Run the model's own code in both precisions, and its nudged copies.

        Raises:
            Problem: ``reference-failed``: the model's own code does not run.
        """
        runs = [Run(name="low", dtype=self.low)]
        runs += [Run(name=f"nudged{i}", dtype=self.low, nudge=i) for i in range(1, self.nudges + 1)]
        runs.append(Run(name="high", dtype=self.high))
        folder, outcome = self._child("reference", runs, self.job.steps, report)
        if not outcome.ok:
            raise Problem(
                "reference-failed",
                f"the reference implementation of the reduced twin did not run: {outcome.reason}",
                outcome.stderr_tail[-2000:],
            )
        tensors = [_tensors(folder / f"{run.name}.safetensors") for run in runs]
        losses = [_report(folder / f"{run.name}.json", self.job.steps)["losses"] for run in runs]
        floor = FLOORS[getattr(torch, self.low)]
        return Reference(high=tensors[-1], low=tensors[:-1], losses=losses[:-1], band=curves.band([*losses], floor))

    def candidate(self, name: str, digests: Sequence[str], steps: int, report: Report) -> tuple[Path, Outcome]:
        """Run the model with these kernels in it."""
        return self._child(name, [Run(name="candidate", dtype=self.low, only=list(digests))], steps, report)

    def measure(self, ran: tuple[Path, Outcome], steps: int, reference: Reference) -> Candidate:
        """Compare what a candidate wrote with the reference."""
        folder, outcome = ran
        if not outcome.ok:
            return Candidate(failure=f"{outcome.reason}: {outcome.stderr_tail.strip()[-500:]}")
        try:
            tensors = _tensors(folder / "candidate.safetensors")
            report = _report(folder / "candidate.json", steps)
        except (OSError, ValueError, KeyError) as error:
            return Candidate(failure=f"unreadable results: {error}")
        rows = compare.compare_layers(tensors, reference.low, reference.high, getattr(torch, self.low), self.letters)
        notes = [f"{name}: a call ran the model's own code ({why})" for name, why in report["fallbacks"].items()]
        moved = compare.choices_differ(tensors, reference.high)
        if moved:
            notes.append(f"{moved} tokens went to other experts than in the reference: near-ties of the router")
        return Candidate(rows=rows, losses=report["losses"], ran=report["ran"], notes=notes)

    def both(self, digests: Sequence[str], report: Report) -> tuple[Reference, Candidate]:
        """Reference and candidate side by side: they share nothing but the twin's plan."""

        def guarded(run: str, step: int, loss: float) -> None:
            with self.lock:
                report(run, step, loss)

        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(self.candidate, "candidate", digests, self.job.steps, guarded)
            reference = pool.submit(self.reference, guarded).result()
            return reference, self.measure(other.result(), self.job.steps, reference)

    def _child(self, name: str, runs: list[Run], steps: int, report: Report) -> tuple[Path, Outcome]:
        folder = self.scratch / name
        folder.mkdir()
        job = self.job.model_copy(update={"runs": runs, "steps": steps})
        (folder / "job.json").write_text(job.model_dump_json())
        outcome = run_module(
            "onboarding.stages.align.child",
            ["job.json"],
            scratch=folder,
            read_only=[Path(path) for path in (job.bundle, job.code) if path],
            limits=LIMITS[job.device],
            env={"OMP_NUM_THREADS": "1", **(CONFINED if job.code else {})},
            on_line=lambda line: _pass_on(line, report),
            gpu=job.device == "cuda",
            unsafe=self.unsafe,
        )
        return folder, outcome


def _pass_on(line: str, report: Report) -> None:
    """A progress line of a child; anything else that it prints is not ours to read."""
    try:
        data = json.loads(line)
        run, step, loss = str(data["run"]), int(data["step"]), float(data["loss"])
    except (ValueError, TypeError, KeyError):
        return
    report(run, step, loss)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(read_left_behind(path, LIMITS["cuda"].scratch_bytes))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _report(path: Path, steps: int) -> dict[str, Any]:
    """A run's report, checked: it was written by code that is not trusted."""
    data = json.loads(read_left_behind(path, LIMITS["cpu"].output_bytes))
    losses = [float(value) for value in data["losses"]]
    if len(losses) != steps:
        raise ValueError(f"{len(losses)} losses for {steps} steps")
    return {
        "losses": losses,
        "ran": {str(digest): int(count) for digest, count in data["ran"].items()},
        "fallbacks": {str(name): str(why) for name, why in data["fallbacks"].items()},
    }
