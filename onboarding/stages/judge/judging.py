"""Judges one candidate: draws the trials, has the confined process run them, and compares. The only authority."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from kernel_templates.registry import FAMILIES, family_module
from kernel_templates.spec import OperatorSpec
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Sandbox
from onboarding.stages.judge import modes, novel, sanitizer, steering, structure, trials, trying, work
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.result import CaseReport, JudgeResult
from onboarding.stages.judge.trials import Tally, Trial
from onboarding.stages.judge.version import judge_version

Progress = Callable[[int, int, str], None]

NOT_RUN = {
    "interpreted": [
        "compute-sanitizer (memcheck, racecheck, initcheck): the kernels were interpreted, and it needs a GPU",
        "timing: an interpreted kernel has no time that means anything",
        "offsets beyond 2^31 elements: they need more memory than a case on CPU may take",
    ],
    "compiled": ["timing: the tuner and the benchmarks time kernels, the judge does not"],
}
"""Checks that a level cannot have."""
FAILED_CASES_ENOUGH = 3
"""After so many refuted cases the rest adds nothing."""

LIMITS = {
    "cpu": Limits(wall_s=1800.0, memory_bytes=4 * 2**30, output_bytes=8 * 2**20),
    "cuda": Limits(
        wall_s=1800.0, memory_bytes=32 * 2**30, processes=512, file_bytes=8 * 2**30, scratch_bytes=24 * 2**30
    ),
}
ANSWER_S = {"cpu": 60.0, "cuda": 240.0}
"""Longest time of work for one case: on a GPU its kernels are compiled in it."""


@dataclass(kw_only=True)
class _Findings:
    cases: list[CaseReport] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    """What its source may not contain."""
    tally: Tally = field(default_factory=Tally)
    modes: dict[str, bool] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    child: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of what happens inside to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = round(self.phases.get(phase, 0.0) + time.monotonic() - began, 2)


def judge(
    source: bytes,
    spec: OperatorSpec,
    *,
    folder: Path,
    device: str = "cpu",
    cases: int = 12,
    seed: int | None = None,
    unsafe: bool = False,
    backend: str = "",
    configs: Path | None = None,
    limits: Limits | None = None,
    answer_s: float | None = None,
    progress: Progress = lambda done, total, label: None,
) -> JudgeResult:
    """Judge a candidate's source for ``spec``.

    Args:
        folder: private to this run.
        device: ``cpu`` (interpreted) or ``cuda`` (compiled).
        cases: how many cases to try.
        seed: only to reproduce a verdict; drawn here, after the candidate's bytes are fixed, by default.
        unsafe: allow running without a sandbox where none works.
        backend: name of the sandbox backend; the best by default.
        configs: folder of configuration tables; the family's own by default.

    Raises:
        Problem: no sandbox works, or the child process does not start. A bad candidate never raises.
    """
    began = time.monotonic()
    sandbox = Sandbox(gpu=device == "cuda", unsafe=unsafe, backend=backend)
    examinee = Examinee(sandbox, folder, device, limits or LIMITS[device], answer_s or ANSWER_S[device])
    findings = _Findings(flaws=[str(finding) for finding in structure.findings(source)])
    if seed is None:
        seed = int.from_bytes(os.urandom(7), "big")
    try:
        with findings.timed("start"):
            findings.child = examinee.ready()
        try:
            _load(examinee, source, spec, configs or novel.configs_for(spec, source, folder / "configs"))
            with novel.FAMILY.opened(spec, folder / "reference", unsafe=unsafe):
                _try_all(examinee, spec, source, device, cases, seed, findings, progress)
        except Refusal as refusal:
            findings.reasons.append(str(refusal))
    finally:
        examinee.close()
    findings.reasons += findings.flaws
    return _verdict(findings, spec, source, device, seed).model_copy(
        update={"sandbox": sandbox.describe(), "seconds": round(time.monotonic() - began, 2)}
    )


def _load(examinee: Examinee, source: bytes, spec: OperatorSpec, configs: Path) -> None:
    path = examinee.given / "candidate.py"
    path.write_bytes(source)
    path.chmod(0o644)
    tables = shutil.copytree(configs, examinee.given / "configs")
    tables.chmod(0o755)
    answer = examinee.ask({"kind": "load", "candidate": str(path), "configs": str(tables)})
    for part, roles in (("inputs", spec.inputs()), ("outputs", spec.outputs())):
        names = [role.name for role in roles]
        if answer.get(part) != names:
            raise Refusal(f"its {part} are {answer.get(part)} instead of {names}")


def _try_all(
    examinee: Examinee,
    spec: OperatorSpec,
    source: bytes,
    device: str,
    count: int,
    seed: int,
    findings: _Findings,
    progress: Progress,
) -> None:
    level = level_of(device)
    # an interpreted launch adds up in one order whatever its kernels say
    atomic = level == "compiled" and declared(source, "DETERMINISM") == "atomic"
    by_need = bool(_own_traits(spec).get("forward_needs"))
    findings.reasons += _false_claims(source, spec)
    drawn = trials.draw(
        spec, count, level, torch.device(device), seed, numbers=steering.numbers_in(source), tally=findings.tally
    )
    telling: list[Trial] = []
    for i, trial in enumerate(_ahead(drawn, findings)):
        progress(min(i, count), count, trial.case.name)
        try:
            with findings.timed("cases"):
                report = trying.attempt(examinee, trial, large=bool(i % 2), atomic=atomic, by_need=by_need)
        except Refusal as refusal:
            findings.cases.append(trying.report_of(trial, reason=str(refusal)))
            raise Refusal(f"case {trial.case.name}: {refusal}") from refusal
        findings.cases.append(report)
        if not report.passed:
            findings.reasons.append(f"case {trial.case.name}: {report.reason}")
        if trial.sensitivity and all(e.value.numel() for e in trial.calls[0].expected.values()):
            telling.append(trial)
        if sum(not c.passed for c in findings.cases) >= FAILED_CASES_ENOUGH:
            return
    if not telling or not all(case.passed for case in findings.cases):
        return
    progress(count, count, "is the work done by its kernels?")
    with findings.timed("work"):
        reasons, findings.operators = work.done_by_kernels(examinee, telling)
    findings.reasons += reasons
    quickest = min(telling, key=_elements)
    if not findings.reasons:
        progress(count, count, "subsets of gradients, recomputed, compiled")
        with findings.timed("modes"):
            findings.modes, reasons = modes.in_every_mode(
                examinee, quickest, random.Random(seed), compiled=True, twice=not _own_traits(spec).get("released")
            )
        findings.reasons += reasons
    if level == "compiled" and not findings.reasons and not findings.flaws:
        progress(count, count, "compute-sanitizer")
        with findings.timed("sanitizer"):
            reasons, findings.not_run = sanitizer.examine(examinee, quickest)
        findings.reasons += reasons


def _own_traits(spec: OperatorSpec) -> dict[str, Any]:
    """What the family's own template says of itself."""
    traits = getattr(family_module(spec.family, "template"), "traits", None) if spec.family in FAMILIES else None
    return dict(traits(spec)) if traits else {}


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, list | tuple | set | frozenset) else value


def _false_claims(source: bytes, spec: OperatorSpec) -> list[str]:
    """What a candidate says of itself to be judged less strictly, and may not say."""
    reasons = []
    traits, own = declared(source, "TRAITS"), _own_traits(spec)
    for name in ("forward_needs", "released"):
        if isinstance(traits, dict) and traits.get(name) and _plain(traits[name]) != _plain(own.get(name)):
            reasons.append(f"TRAITS claims {name}, which is not of this operator")
    if declared(source, "DETERMINISM") == "atomic" and not structure.atomics_in(source):
        reasons.append("DETERMINISM says atomic, and no atomic operation is in its kernels")
    return reasons


def level_of(device: str) -> Literal["interpreted", "compiled"]:
    """What a verdict on this device is worth."""
    return "compiled" if device == "cuda" else "interpreted"


def _elements(trial: Trial) -> int:
    return sum(t.numel() for t in trial.calls[0].tensors.values() if t is not None)


def _ahead(drawn: Iterator[Trial], findings: _Findings) -> Iterator[Trial]:
    """Draw the next trial while the candidate works on this one."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, drawn, None)
        while True:
            with findings.timed("waiting for references"):
                trial = upcoming.result()
            if trial is None:
                return
            upcoming = thread.submit(next, drawn, None)
            yield trial


def declared(source: bytes, name: str) -> object:
    """The value of a module-level constant of a candidate, read without running it; None if there is none.

    Of several assignments the last one counts, as for Python.
    """
    found: object = None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(t, ast.Name) and t.id == name for t in targets):
            continue
        try:
            found = ast.literal_eval(node.value) if node.value is not None else found
        except ValueError:
            found = None
    return found


def _verdict(findings: _Findings, spec: OperatorSpec, source: bytes, device: str, seed: int) -> JudgeResult:
    tally, level = findings.tally, level_of(device)
    if not findings.reasons and (tally.untold or not tally.told):
        names = ", ".join(sorted(tally.untold)) or "any result"
        raise Problem(
            "judge-inconclusive",
            f"no case could tell a worthless result from a right one for {names}",
            "raise the number of cases, or the family's cases need larger ones",
            status=500,
        )
    shares = [(error.share, f"{error.tensor} in case {case.name}") for case in findings.cases for error in case.errors]
    worst_share, worst_where = max(shares, default=(0.0, ""))
    accepted = not findings.reasons
    passed = sum(case.passed for case in findings.cases)
    evidence = f"{passed} of {len(findings.cases)} cases"
    return JudgeResult(
        outcome="accepted" if accepted else "refused",
        summary=f"accepted: {evidence}, worst error {worst_share:.2f} of its tolerance ({worst_where})"
        if accepted
        else f"refused: {findings.reasons[0][:160]}",
        spec=spec.to_dict(),
        spec_digest=spec.digest(),
        candidate=hashlib.sha256(source).hexdigest(),
        level=level,
        device=findings.child.get("gpu") or "cpu",
        triton=str(findings.child.get("triton", "")),
        torch=str(findings.child.get("torch", "")),
        seed=seed,
        cases=findings.cases,
        worst_share=worst_share,
        worst_where=worst_where,
        reasons=findings.reasons,
        sandbox="",
        modes=findings.modes,
        phases=findings.phases,
        operators=findings.operators,
        told=dict(sorted(tally.told.items())),
        void_cases=tally.void,
        determinism="atomic" if declared(source, "DETERMINISM") == "atomic" else "bitwise",
        numbers_beyond=steering.beyond(spec, steering.numbers_in(source), level),
        not_run=[*NOT_RUN[level], *findings.not_run],
        judge_version=judge_version(spec.family),
        software={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": str(findings.child.get("triton", "")),
            "system": f"{platform.system()} {platform.release()}",
        },
    )
