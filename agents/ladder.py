"""The checks before the judge, cheap to dear: a candidate climbs until one says why it is no good.

A filter only, to spend the judge's time on what has a chance; whatever passes here is as unproven as before.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_templates.novel import ACTIVATION, NovelSpec
from kernel_templates.spec import OperatorSpec
from onboarding.policy import RUNGS, TOP
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Sandbox, module_command
from onboarding.stages.generate.compose import ComposeError, compose
from onboarding.stages.judge import novel, structure
from onboarding.stages.judge.judging import declared, judge

CASES = 2
"""Of the one-shape check."""
COMPILE = Limits(wall_s=300.0, memory_bytes=4 * 2**30)
EXACT = 1e-8
"""Relative error that a decomposition may have in fp64: another order of sums, and no other function."""
_LARGEST = 2**24


@dataclass(kw_only=True)
class Climb:
    """How far a candidate came."""

    source: str = ""
    """As composed; empty before that."""
    rung: int = 0
    passed: float = 0.0
    share: float = 1e300
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    """What the compiler said of registers and shared memory."""


def climb(body: str, decomposition: str, spec: OperatorSpec, *, unsafe: bool = False) -> Climb:
    """Run the checks in order, up to the first that fails."""
    found = Climb()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="onboard-ladder-") as folder:
        checks: dict[str, Callable[[], list[str]]] = {
            "composes": lambda: _composes(found, body, spec),
            "clean": lambda: _clean(found),
            "decomposed": lambda: _decomposed(decomposition, spec, Path(folder) / "decomposition", unsafe),
            "compiles": lambda: _compiles(found, spec, Path(folder) / "compile", unsafe),
            "one shape": lambda: _one_shape(found, spec, Path(folder) / "judge", unsafe),
        }
        for name, check in checks.items():
            found.reasons = check()
            if found.reasons:
                break
            found.rung = RUNGS.index(name)
    if found.rung == TOP:
        found.passed = 1.0
    found.seconds = time.monotonic() - begin
    return found


def _composes(found: Climb, body: str, spec: OperatorSpec) -> list[str]:
    try:
        found.source = compose(body, spec)
    except ComposeError as error:
        return [str(error)]
    if not isinstance(declared(found.source.encode(), "CONFIGS"), list) and isinstance(spec, NovelSpec):
        return ["it declares no CONFIGS: a list of dicts of constants"]
    return []


def _clean(found: Climb) -> list[str]:
    return [str(finding) for finding in structure.findings(found.source.encode())[:8]]


def _decomposed(decomposition: str, spec: OperatorSpec, folder: Path, unsafe: bool) -> list[str]:
    """The decomposition against the reference, values and gradients, both confined and in fp64."""
    if not isinstance(spec, NovelSpec) or not decomposition.strip():
        return []
    claimed = NovelSpec(name=spec.name, source=decomposition, signature=spec.signature, dtype=spec.dtype)
    case = novel.FAMILY.typical(spec)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        n: t.double() if t.is_floating_point() else t
        for n, t in novel.FAMILY.make_tensors(spec, case, generator, torch.float32, "cpu").items()
        if t is not None
    }
    needs = frozenset(r.name for r in spec.inputs() if r.differentiable)
    given = novel.FAMILY.outputs_like(dict(tensors), spec, {})[0]
    floats = {r.name for r in spec.outputs() if r.differentiable}
    upstream = {
        n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in given.items() if n in floats
    }
    found = []
    for name, one in (("reference", spec), ("claim", claimed)):
        evaluator = novel.Evaluator(one, folder / name, unsafe=unsafe)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            outputs, gradients = evaluator.evaluate(tensors, needs, upstream, "")
        except Problem as problem:
            if one is spec:
                raise
            return [f"the decomposition cannot be run: {problem.detail}"]
        finally:
            evaluator.close()
        found.append(outputs | {f"grad {n}": g for n, g in gradients.items()})
    reasons = []
    for name, value in found[0].items():
        error = _relative(found[1][name], value)
        if not error <= EXACT:
            reasons.append(f"the decomposition's {name} is off by {error:.2g} of the reference's ({case.name})")
    return reasons


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    size = float(expected.double().square().sum().sqrt())
    off = float((actual.double() - expected.double()).square().sum().sqrt())
    return off / size if size > 0 else (0.0 if off == 0 else math.inf)


def _compiles(found: Climb, spec: OperatorSpec, folder: Path, unsafe: bool) -> list[str]:
    """Every configuration's default compiled for sm_90 at the published sizes."""
    if not isinstance(spec, NovelSpec):
        return []
    listed: Any = declared(found.source.encode(), "CONFIGS")
    request = {
        "arch": 90,
        "jobs": [{"source": "", "tensors": _shapes(spec), "config": listed[0], "label": "default"}],
    }
    given, work = folder / "given", folder / "work"
    for place in (given, work):
        place.mkdir(parents=True)
        place.chmod(0o755)
    candidate = given / "candidate.py"
    candidate.write_text(found.source)
    request["jobs"][0]["source"] = str(candidate)  # type: ignore[index]
    (given / "job.json").write_text(json.dumps(request))
    for path in given.iterdir():
        path.chmod(0o644)
    lines: list[str] = []
    argv, env = module_command("onboarding.stages.generate.compile_child", [str(given / "job.json")])
    outcome = Sandbox(unsafe=unsafe).run(
        argv, scratch=work, read_only=[given], limits=COMPILE, env=env, on_line=lines.append
    )
    answer = _answer(lines)
    if answer is None:
        tail = "\n".join(outcome.stderr_tail.strip().splitlines()[-12:])
        return [f"its host code does not run with fake tensors at the published sizes: {tail[-1500:]}"]
    found.notes["compiled"] = answer
    return [
        f"{row['kernel']} ({row['phase']}) does not compile: {row['error'][:1500]}" for row in answer if row["error"]
    ]


def _answer(lines: list[str]) -> list[dict[str, Any]] | None:
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            rows: list[dict[str, Any]] = json.loads(line)["compiled"]
            return rows
    return None


def _shapes(spec: NovelSpec) -> dict[str, Any]:
    """Shapes of the published sizes, the largest dim halved until no input has more than 2^24 elements."""
    call = spec.call
    sizes = {name: dim.full for name, dim in call.dims.items()}
    while max(math.prod(t.sizes(sizes)) for t in call.inputs) > _LARGEST:
        free = {n: s for n, s in sizes.items() if not call.dims[n].choices and s > max(1, call.dims[n].least)}
        if not free:
            break
        name = max(free, key=lambda n: free[n])
        sizes[name] = max(call.dims[name].least, sizes[name] // 2)
    return {t.name: [list(t.sizes(sizes)), spec.dtype if t.dtype == ACTIVATION else t.dtype] for t in call.inputs}


def _one_shape(found: Climb, spec: OperatorSpec, folder: Path, unsafe: bool) -> list[str]:
    folder.mkdir(parents=True)
    verdict = judge(found.source.encode(), spec, folder=folder, device="cpu", cases=CASES, unsafe=unsafe)
    shutil.rmtree(folder, ignore_errors=True)
    found.share = verdict.worst_share
    found.passed = sum(case.passed for case in verdict.cases) / CASES
    return verdict.reasons[:6]
