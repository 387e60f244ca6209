"""Judges one candidate: draws the trials, has the confined process run them, and compares. The only authority."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_templates.spec import OperatorSpec
from onboarding.problem import Problem
from onboarding.sandbox import Limits, Sandbox
from onboarding.stages.judge import images, novel, structure, trials, verify
from onboarding.stages.judge.examinee import Examinee, Refusal
from onboarding.stages.judge.images import Image
from onboarding.stages.judge.oracle import Call
from onboarding.stages.judge.result import CaseReport, JudgeResult
from onboarding.stages.judge.trials import Trial

Progress = Callable[[int, int, str], None]

FAILED_CASES_ENOUGH = 3
"""After so many refuted cases the rest adds nothing."""

# what host code may have torch do to floating tensors: make, move and convert them, and add up partial results; on
# integers (routing, offsets) anything
_ALLOWED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_full", "zeros",
    "zeros_like", "ones", "ones_like", "full", "full_like", "fill_", "zero_", "set_", "copy_", "clone",
    "_to_copy", "contiguous", "lift_fresh", "detach", "alias", "view", "_unsafe_view", "reshape",
    "_reshape_alias", "as_strided", "expand", "slice", "select", "split", "split_with_sizes", "narrow",
    "transpose", "permute", "t", "unsqueeze", "squeeze", "unbind", "unflatten", "flatten", "cat", "stack",
    "constant_pad_nd", "sum", "add", "add_",
}  # fmt: skip

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
    told: set[str] = field(default_factory=set)
    """Tensors for which some case could tell a worthless result."""
    seen: set[str] = field(default_factory=set)
    child: dict[str, Any] = field(default_factory=dict)


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
    digest = hashlib.sha256(source).hexdigest()
    sandbox = Sandbox(gpu=device == "cuda", unsafe=unsafe, backend=backend)
    examinee = Examinee(sandbox, folder, device, limits or LIMITS[device], answer_s or ANSWER_S[device])
    findings = _Findings()
    if seed is None:
        seed = int.from_bytes(os.urandom(7), "big")
    try:
        findings.child = examinee.ready()
        try:
            _load(examinee, source, spec, configs or novel.configs_for(spec, source, folder / "configs"))
            with novel.FAMILY.opened(spec, folder / "reference", unsafe=unsafe):
                _try_all(examinee, spec, source, device, cases, seed, findings, progress)
        except Refusal as refusal:
            findings.reasons.append(str(refusal))
    finally:
        examinee.close()
    findings.reasons += [str(finding) for finding in structure.findings(source)]
    return _verdict(findings, spec, digest, device, seed, sandbox.describe())


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
    level = "compiled" if device == "cuda" else "interpreted"
    atomic = declared(source, "DETERMINISM") == "atomic"
    largest: Trial | None = None
    for i, trial in enumerate(_ahead(trials.draw(spec, count, level, torch.device(device), seed))):
        progress(i, count, trial.case.name)
        try:
            report = _try(examinee, trial, large=bool(i % 2), atomic=atomic)
        except Refusal as refusal:
            findings.cases.append(_report(trial, reason=str(refusal)))
            raise Refusal(f"case {trial.case.name}: {refusal}") from refusal
        findings.cases.append(report)
        findings.seen |= set(trial.calls[0].expected)
        findings.told |= {name for name, share in trial.sensitivity.items() if share > 1.0}
        if not report.passed:
            findings.reasons.append(f"case {trial.case.name}: {report.reason}")
        if largest is None and all(e.value.numel() for e in trial.calls[0].expected.values()):
            largest = trial
        if sum(not c.passed for c in findings.cases) >= FAILED_CASES_ENOUGH:
            return
    progress(count, count, "is the work done by its kernels?")
    if not findings.reasons and largest is not None:
        findings.reasons += _work_is_done_by_kernels(examinee, largest)


def _ahead(drawn: Iterator[Trial]) -> Iterator[Trial]:
    """Draw the next trial while the candidate works on this one."""
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, drawn, None)
        while (trial := upcoming.result()) is not None:
            upcoming = thread.submit(next, drawn, None)
            yield trial


def _report(trial: Trial, reason: str) -> CaseReport:
    return CaseReport(
        name=f"{trial.case.name}; {trials.WORDS[trial.twist]}",
        dims=trial.case.dims,
        dtype=trial.spec.dtype,
        distribution=trial.case.distribution,
        passed=not reason,
        reason=reason,
        sensitivity=trial.sensitivity,
    )


def _try(examinee: Examinee, trial: Trial, *, large: bool, atomic: bool) -> CaseReport:
    """Run one trial.

    Raises:
        Refusal: the candidate raised, died or hung.
    """
    begin = time.perf_counter()
    first, second, third = trial.calls
    reuse = _same_shapes(first, second)
    sent = [
        _send(examinee, 0, first, large=large),
        _send(examinee, 1, second, large=large, reuse=0 if reuse else None),
        _send(
            examinee,
            2,
            third,
            large=not large,
            layout=trial.layout,
            upstream_layout="ones" if trial.twist == "ones" else trial.upstream_layout,
            expanded=trial.expanded,
        ),
    ]
    try:
        answer = examinee.ask({"kind": "case", "calls": [s.request for s in sent], "out": str(examinee.work)})
    finally:
        for path in examinee.given.glob("*.bin"):
            path.unlink()
    reports = answer.get("calls")
    if not isinstance(reports, list) or len(reports) != len(sent):
        raise Refusal("its process wrote noise instead of an answer")
    stale = {"it repeats what an earlier call returned": first}
    overwritten = {"a later call overwrote it, or it aliases an input": second}
    report = _report(trial, "")
    reasons: list[str] = []
    results = []
    for number, (call, others) in enumerate(zip(trial.calls, (overwritten, stale, {}), strict=True)):
        returned = verify.read_call(call, reports[number], examinee.work, number)
        results.append(returned)
        errors, wrong = verify.compare(call, returned, others)
        what = ("", "second call: ", f"{trials.WORDS[trial.twist]}: ")[number]
        reasons += [what + text for text in [*returned.wrong, *wrong]]
        if number == 0:
            report.errors = errors
        report.checks[("values", "fresh values at the same addresses", trials.WORDS[trial.twist])[number]] = not (
            returned.wrong or wrong
        )
    # the buffers of the first call hold the second call's inputs when they are written down
    changed = [
        text
        for number in ([1, 2] if reuse else [0, 1, 2])
        for text in verify.inputs_changed(sent[number].storages, reports[number], examinee.work, number)
    ]
    reasons = changed + reasons
    report.checks["inputs and the memory around them unchanged"] = not changed
    if not atomic and not reasons and trial.twist != "expanded":
        differs = [
            name
            for name, tensor in results[2].tensors.items()
            if (not name.startswith("grad ") or trial.twist in ("transposed", "split", "offset"))
            and not images.same_bytes(tensor.contiguous(), results[0].tensors[name].contiguous())
        ]
        report.checks["bitwise repeatable"] = not differs
        reasons += [f"{name} differs from call to call with the same values" for name in differs]
    report.passed, report.reason = not reasons, "; ".join(reasons[:4])
    report.seconds = round(time.perf_counter() - begin, 3)
    return report


@dataclass(kw_only=True)
class _Sent:
    request: dict[str, Any]
    storages: dict[str, tuple[Tensor, Image]]


def _send(
    examinee: Examinee,
    number: int,
    call: Call,
    *,
    large: bool,
    reuse: int | None = None,
    layout: str = "plain",
    upstream_layout: str = "plain",
    expanded: tuple[str, int] = ("", 0),
) -> _Sent:
    """Write one call's tensors where the process can read them, and describe them."""
    storages: dict[str, tuple[Tensor, Image]] = {}
    tensors: dict[str, Any] = {}
    upstream: dict[str, Any] = {}
    for name, tensor in call.tensors.items():
        if tensor is None:
            tensors[name] = None
            continue
        how = "expanded" if name == expanded[0] else layout
        storage, image = images.lay_out(tensor, how, large=large, expanded_dim=expanded[1])
        storages[name] = (storage, image)
        path = examinee.given / f"{number}.{name}.bin"
        images.save(storage, path)
        tensors[name] = image.to_json() | {"file": str(path), "requires_grad": name in call.needs}
    for name, gradient in call.upstream.items():
        if upstream_layout == "ones":
            storage = torch.ones(1, dtype=gradient.dtype)
            image = Image(
                dtype=str(gradient.dtype).removeprefix("torch."),
                shape=tuple(gradient.shape),
                stride=(0,) * gradient.ndim,
                offset=0,
                elements=1,
            )
        else:
            storage, image = images.lay_out(gradient, upstream_layout, large=large)
        path = examinee.given / f"{number}.upstream.{name}.bin"
        images.save(storage, path)
        upstream[name] = image.to_json() | {"file": str(path)}
    return _Sent(request={"tensors": tensors, "upstream": upstream, "reuse": reuse}, storages=storages)


def _same_shapes(a: Call, b: Call) -> bool:
    return all(
        (s is None) == (t is None) and (s is None or t is None or (s.shape, s.dtype) == (t.shape, t.dtype))
        for s, t in zip(a.tensors.values(), b.tensors.values(), strict=True)
    )


def _work_is_done_by_kernels(examinee: Examinee, trial: Trial) -> list[str]:
    """With Triton launches that do nothing, no result may still be right; and torch may not do the work either."""
    call = trial.calls[0]
    request = _send(examinee, 0, call, large=False).request
    reasons = []
    try:
        answer = examinee.ask({"kind": "hollow", "calls": [request], "out": str(examinee.work)})
        returned = verify.read_call(call, answer["calls"][0], examinee.work, 0)
        for name, tensor in returned.tensors.items():
            if call.expected[name].compare(tensor).error <= call.expected[name].limit:
                reasons.append(f"{name} is right although its kernels did nothing: something else computes it")
    except Refusal as refusal:
        # an exception over garbage is as good as garbage; a dead process is not
        if "it raised" not in str(refusal):
            reasons.append(f"with kernels that do nothing, {refusal}")
            return reasons
    answer = examinee.ask({"kind": "operators", "calls": [request]})
    used = answer.get("operators", {})
    names = sorted(n for n in used if n.removeprefix("aten::") not in _ALLOWED)
    if names:
        reasons.append(f"its host code leaves work to torch: {', '.join(names)}")
    return reasons


def declared(source: bytes, name: str) -> object:
    """The value of a module-level constant of a candidate, read without running it; None if there is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                return None
    return None


def _verdict(findings: _Findings, spec: OperatorSpec, digest: str, device: str, seed: int, sandbox: str) -> JudgeResult:
    untold = sorted(findings.seen - findings.told)
    if untold and not findings.reasons:
        raise Problem(
            "judge-inconclusive",
            f"no case could tell a worthless result from a right one for {', '.join(untold)}",
            "raise the number of cases, or the family's cases need larger ones",
            status=500,
        )
    worst_share, worst_where = 0.0, ""
    for case in findings.cases:
        for error in case.errors:
            if error.share >= worst_share:
                worst_share, worst_where = error.share, f"{error.tensor} in case {case.name}"
    accepted = not findings.reasons
    passed = sum(case.passed for case in findings.cases)
    evidence = f"{passed} of {len(findings.cases)} cases"
    return JudgeResult(
        outcome="accepted" if accepted else "refused",
        summary=f"accepted: {evidence}, worst error {worst_share:.2f} of its tolerance ({worst_where})"
        if accepted
        else f"refused: {findings.reasons[0][:160]}",
        spec=spec.to_dict(),
        candidate=digest,
        level="compiled" if device == "cuda" else "interpreted",
        device=findings.child.get("gpu") or "cpu",
        triton=str(findings.child.get("triton", "")),
        torch=str(findings.child.get("torch", "")),
        seed=seed,
        cases=findings.cases,
        worst_share=worst_share,
        worst_where=worst_where,
        reasons=findings.reasons,
        sandbox=sandbox,
    )
