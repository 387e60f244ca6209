"""``onboard judge``: a verdict on one kernel, here, without a service; the same seed gives the same verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from onboarding.problem import Problem

SPEC = "JSON file of the operator spec; by default the one that the candidate names."
SEED = "Reproduce the verdict that was given with this seed; drawn after the candidate is read by default."


def judge(
    candidate: Annotated[Path, typer.Argument(help="The kernel's source file.")],
    spec: Annotated[Path | None, typer.Option(help=SPEC)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help=SEED)] = None,
    cases: Annotated[int, typer.Option(min=1, max=200, help="Cases of the family; others are added to them.")] = 12,
    device: Annotated[str, typer.Option(help="auto, cpu (interpreted) or cuda (compiled).")] = "auto",
    unsafe: Annotated[bool, typer.Option("--unsafe-no-sandbox", help="Run it where no sandbox works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole verdict, for machines.")] = False,
) -> None:
    """Judge a kernel against its reference in fp64: correctness, gradients, memory, who does the work."""
    for path in (candidate, *([spec] if spec else [])):
        if not path.is_file():
            raise Problem("no-such-file", f"there is no file {path}", "name a kernel's source file and its spec")
    if device not in ("auto", "cpu", "cuda"):
        raise Problem("unknown-device", f"there is no device {device[:40]!r}", "it is auto, cpu or cuda")
    command = [sys.executable, "-P", "-m", "onboarding.stages.judge", str(candidate.resolve())]
    command += ["--cases", str(cases), "--device", device]
    command += ["--spec", str(spec.resolve())] if spec else []
    command += ["--seed", str(seed)] if seed is not None else []
    command += ["--unsafe-no-sandbox"] * unsafe + ["--json"] * as_json
    # the judge imports torch, which this process never does
    raise typer.Exit(subprocess.run(command, check=False).returncode)
