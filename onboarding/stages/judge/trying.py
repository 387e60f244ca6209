"""One case of a verdict: three calls, compared with what must come out."""

from __future__ import annotations

import time

from onboarding.stages.judge import exchange, images, trials, verify
from onboarding.stages.judge.examinee import Examinee
from onboarding.stages.judge.result import CaseReport
from onboarding.stages.judge.trials import Trial


def report_of(trial: Trial, reason: str) -> CaseReport:
    """An empty report of the trial; passed unless there is a reason."""
    return CaseReport(
        name=f"{trial.case.name}; {trials.WORDS[trial.twist]}",
        dims=trial.case.dims,
        dtype=trial.spec.dtype,
        distribution=trial.case.distribution,
        passed=not reason,
        reason=reason,
        sensitivity=trial.sensitivity,
    )


def attempt(examinee: Examinee, trial: Trial, *, large: bool, atomic: bool, by_need: bool) -> CaseReport:
    """Run one trial.

    Args:
        large: which of two sizes of guards lies around its tensors.
        atomic: the candidate says that it adds up in no fixed order.
        by_need: the candidate says that its forward goes another way for other wanted gradients.

    Raises:
        Refusal: the candidate raised, died or hung.
    """
    begin = time.perf_counter()
    first, second, third = trial.calls
    reuse = exchange.same_shapes(first, second)
    sent = [
        exchange.send(examinee, 0, first, large=large),
        exchange.send(examinee, 1, second, large=large, reuse=0 if reuse else None),
        exchange.send(
            examinee,
            2,
            third,
            large=not large,
            layout=trial.layout,
            upstream_layout="ones" if trial.twist == "ones" else trial.upstream_layout,
            expanded=trial.expanded,
        ),
    ]
    reports = exchange.ask(examinee, sent)
    fresh = "other values at the same addresses"
    labels = ("values", fresh, trials.WORDS[trial.twist])
    stale = {"it repeats what an earlier call returned": first}
    overwritten = {"a later call overwrote it, or it aliases an input": second}
    report = report_of(trial, "")
    reasons: list[str] = []
    results = []
    for number, (call, others) in enumerate(zip(trial.calls, (overwritten, stale, {}), strict=True)):
        returned = verify.read_call(call, reports[number], examinee.work, number)
        results.append(returned)
        errors, wrong = verify.compare(call, returned, others)
        wide = f" ({trial.second_words})" if trial.second_words else ""
        what = ("", f"second call{wide}: ", f"{trials.WORDS[trial.twist]}: ")[number]
        reasons += [what + text for text in [*returned.wrong, *wrong]]
        if number == 0:
            report.errors = errors
            worst = max(errors, key=lambda e: e.share, default=None)
            if worst is not None:
                report.block_map = verify.block_map(call.expected[worst.tensor], returned.tensors[worst.tensor])
                report.block_map_of = worst.tensor
        report.checks[labels[number]] = not (returned.wrong or wrong)
    # the buffers of the first call hold the second call's inputs when they are written down
    changed = [
        text
        for number in ([1, 2] if reuse else [0, 1, 2])
        for text in verify.changed_in(sent[number], examinee.work, number)
    ]
    reasons = changed + reasons
    report.checks["inputs and the memory around them unchanged"] = not changed
    other_way = trial.twist == "expanded" or (by_need and trial.twist == "subset")
    if not atomic and not reasons and not other_way:
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
