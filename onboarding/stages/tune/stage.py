"""tune: the fastest configurations of an accepted candidate on the GPU at hand, proven by the judge."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from kernel_templates import configs
from kernel_templates.case import Case
from kernel_templates.registry import family_module, load_spec
from kernel_templates.spec import OperatorSpec
from onboarding.context import StageContext
from onboarding.problem import Problem, StageSkipped
from onboarding.sandbox import Limits, Sandbox, module_command
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.judging import judge
from onboarding.stages.judge.novel import configs_for
from onboarding.stages.judge.stage import choose_device
from onboarding.stages.tune.result import TunedRow, TuneResult

SECONDS = 20.0
"""Timing of one shape; compilation comes on top."""
LIMITS = Limits(wall_s=900.0, memory_bytes=64 * 2**30, processes=512, scratch_bytes=8 * 2**30)
PROOF_CASES = 4


def run(context: StageContext) -> TuneResult:
    """Search the family's space for the operator ``context.key``.

    Raises:
        StageSkipped: there is no GPU, or the search or the proof of its result fails; says why.
    """
    if choose_device(context.options.device) == "cpu":
        raise StageSkipped(skip_reason(context.options.device))
    generated = context.result("generate", GenerateResult, context.key)
    source = context.artifacts.get(generated.candidate.digest)
    try:
        return tune(source, load_spec(generated.spec), context)
    except Problem as problem:
        # the kernel is proven with the family's own configurations: a search that fails costs speed, not the job
        why = f"{problem.title}: {problem.detail}"[:400]
        raise StageSkipped(f"{why}; the family's own configurations come with the bundle") from problem


def skip_reason(asked: str) -> str:
    """Why nothing is tuned, in a user's words."""
    if asked == "cpu" and torch.cuda.is_available():
        return "the job asks for the CPU; the family's own configurations come with the bundle"
    return "no GPU here; the family's own configurations come with the bundle"


def tune(source: bytes, spec: OperatorSpec, context: StageContext) -> TuneResult:
    """Time, choose, write the table of this device, and have the judge prove the candidate with it."""
    begin = time.monotonic()
    device = configs.device_name(torch.device("cuda"))
    rows = search(source, spec, context)
    if not rows:
        raise Problem("tuning-failed", f"no configuration of {spec.words()} runs on this GPU", "see the stage's log")
    folder = context.scratch / "configs"
    shutil.copytree(configs_for(spec, source, context.scratch / "stated"), folder)
    write_table(rows, device, folder)
    verdict = judge(
        source,
        spec,
        folder=context.scratch / "proof",
        device="cuda",
        cases=PROOF_CASES,
        unsafe=context.settings.unsafe_no_sandbox,
        configs=folder,
        progress=context.progress,
    )
    if verdict.outcome != "accepted":
        raise Problem(
            "tuning-refused",
            f"the fastest configurations of {spec.words()} are wrong",
            "; ".join(verdict.reasons[:2]),
            status=500,
        )
    seconds = time.monotonic() - begin
    times = ", ".join(f"{r.forward_ms:.3f} + {r.backward_ms:.3f} ms" for r in rows[:1])
    summary = f"{len(rows)} shape buckets on {device}, {sum(r.tried for r in rows)} configurations tried: {times}"
    return TuneResult(summary=summary, device=device, rows=rows, seconds=round(seconds, 1))


def shapes(spec: OperatorSpec, tokens: int) -> list[Case]:
    """What a training step hands the operator, at the job's sequence length and at shorter and longer ones.

    A novel operator's tokens are not known: the largest of its own cases stand for them.
    """
    cases = family_module(spec.family, "cases")
    if hasattr(cases, "training_case"):
        return [cases.training_case(spec, count) for count in (tokens, max(tokens // 4, 1), 4 * tokens)]
    found = cases.cases(spec, random.Random(0), 8, "compiled")
    return sorted(found, key=lambda case: -math.prod(case.dims.values()))[:1]


def search(source: bytes, spec: OperatorSpec, context: StageContext) -> list[TunedRow]:
    """The best configuration for every shape, as the confined child measured them."""
    given, scratch = context.scratch / "given", context.scratch / "work"
    for folder in (given, scratch):
        folder.mkdir()
        folder.chmod(0o755)
    job: dict[str, Any] = {
        "spec": spec.to_dict(),
        "candidate": str(given / "candidate.py"),
        "cases": [dataclasses.asdict(case) for case in shapes(spec, context.options.sequence_length)],
        "seconds": SECONDS,
    }
    for name, data in (("candidate.py", source), ("job.json", json.dumps(job).encode())):
        (given / name).write_bytes(data)
        (given / name).chmod(0o644)
    rows: list[TunedRow] = []
    done = 0

    def read(line: str) -> None:
        nonlocal done
        try:
            data = json.loads(line)
        except ValueError:
            return  # the candidate prints
        if not isinstance(data, dict):
            return
        if "config" in data:
            bucket = json.dumps(data["bucket"], sort_keys=True)
            facts = ("config", "forward_ms", "backward_ms", "tried", "name", "seconds")
            rows.append(TunedRow(bucket=bucket, **{n: data[n] for n in facts}))
        elif "tried" in data:
            done += int(data["tried"])
            context.progress(done, max(done, int(data["total"]) * len(job["cases"])), spec.words())

    sandbox = Sandbox(gpu=True, unsafe=context.settings.unsafe_no_sandbox)
    argv, env = module_command("onboarding.stages.tune.child", [str(given / "job.json")])
    outcome = sandbox.run(argv, scratch=scratch, read_only=[given], limits=LIMITS, env=env, on_line=read)
    if not outcome.ok and not rows:
        tail = outcome.stderr_tail.strip()[-500:]
        raise Problem("tuning-failed", f"timing {spec.words()} failed: {outcome.reason}", tail, status=500)
    return rows


def write_table(rows: list[TunedRow], device: str, folder: Path) -> Path:
    """Write tuned rows as a table that :mod:`kernel_templates.configs` reads."""
    table = {"device": device, "rows": [{"bucket": json.loads(r.bucket), "config": r.config} for r in rows]}
    path = folder / f"{device}.json"
    path.write_text(json.dumps(table, indent=1))
    return path
