"""Throughput: the reduced twin (CPU) or a slice of the published width (GPU), trained with and without the bundle.

Free of torch: the training runs in a confined child.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from math import isfinite, log2
from pathlib import Path
from typing import Any

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.custom_code.definition import CONFINED, Definition, definition_of
from onboarding.devices import DEVICES, Device
from onboarding.problem import StageSkipped
from onboarding.sandbox import Limits, Outcome, run_module
from onboarding.sandbox.files import read_left_behind
from onboarding.stages.align.result import AlignResult
from onboarding.stages.gaps.result import Roofline
from onboarding.stages.package.trial import accepted, write_trial_bundle
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.throughput.baseline import compared
from onboarding.stages.throughput.growth import exponent
from onboarding.stages.throughput.report import Report, Run
from onboarding.stages.throughput.result import LayerTime, LengthRow, Lengths, RooflinePoint, ThroughputResult, Training

LIMITS = Limits(wall_s=900.0, memory_bytes=8 * 2**30)
GPU_LIMITS = Limits(wall_s=1500.0, memory_bytes=96 * 2**30, processes=512, scratch_bytes=8 * 2**30)
STEPS = {"quick": (1, 3)}
"""Warm-up and timed steps by profile."""
OTHER_STEPS = (2, 8)
QUICK = "left out by the quick profile; the standard one does it"
AS_THE_LAW = 0.2
"""Difference of exponents: the twin's constants and its masks weigh more than the published model's."""
RANDOM_WALK = 0.75
"""Rounding errors that are independent add up with the square root of their number; half as much again is room."""
GPU_LENGTH = 8192
CORPUS = "Python's standard library, byte level"


def run(context: StageContext) -> ThroughputResult:
    """Train and time.

    Raises:
        LookupError: an upstream stage has not finished.
        StageSkipped: the model does not train under the runtime here; says why.
    """
    started = time.monotonic()
    align = context.result("align", AlignResult)
    architecture = context.result("parse", ParseResult).architecture
    definition = definition_of(context)
    cpu = align.device == "cpu"
    if cpu and not align.twin_plan:
        raise StageSkipped("alignment was made by an older version that did not keep the twin's plan; align again")
    warm, steps = STEPS.get(context.profile.name, OTHER_STEPS)
    digests = [digest for digest in accepted(context) if digest not in align.dropped]
    bundle = None if cpu or not digests else write_trial_bundle(context, architecture, digests)
    bundles = [None] if bundle is None else [None, str(bundle)]
    job = {
        "plan": align.twin_plan if cpu else "",
        "config": definition.config,
        "device": "cpu" if cpu else "cuda",
        "labels": labels_of(architecture),
        "seed": context.options.seed,
        "batch": 1,
        "sequence_length": context.profile.sequence_length if cpu else GPU_LENGTH,
        "warm": warm,
        "steps": steps,
        "bundles": bundles,
        "digests": digests,
        "adapters": not cpu,
        "lengths": context.profile.name != "quick",
        "code": str(definition.code.resolve()) if definition.code else None,
    }
    report = _child(context, definition, job, total=len(bundles) * (warm + steps))
    result = _result(architecture, align, job, report, kernels=len(digests), begun=started)
    return beside(result.model_copy(update={"profile": context.profile.name}), context.earlier(context.stage))


def beside(result: ThroughputResult, earlier: Iterable[tuple[str, dict[str, Any]]]) -> ThroughputResult:
    """The result with its comparison; a regression is the first thing that the summary says."""
    found = compared(result, earlier)
    worse = f"REGRESSION against job {found.job_id}: {found.regressed}. " if found and found.regressed else ""
    return result.model_copy(update={"baseline": found, "summary": worse + result.summary})


def _child(context: StageContext, definition: Definition, job: dict[str, Any], total: int) -> Report:
    folder = context.scratch / "training"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    done = 0

    def pass_on(line: str) -> None:
        nonlocal done
        try:
            data = json.loads(line)
            which, step, loss = bool(data["bundle"]), int(data["step"]), float(data["loss"])
        except (ValueError, TypeError, KeyError):
            return
        done += 1
        context.metric("throughput.with" if which else "throughput.without", step, loss)
        context.progress(min(done, total), total, f"{'with' if which else 'without'} the bundle, step {step}")

    cpu = job["device"] == "cpu"
    outcome = run_module(
        "onboarding.stages.throughput.child",
        ["job.json"],
        scratch=folder,
        read_only=[Path(path) for path in (job["code"], *job["bundles"]) if path],
        limits=LIMITS if cpu else GPU_LIMITS,
        env={"OMP_NUM_THREADS": "1" if cpu else "8", **(CONFINED if definition.code else {})},
        on_line=pass_on,
        gpu=not cpu,
        unsafe=context.settings.unsafe_no_sandbox,
    )
    return _read(folder, outcome)


def _read(folder: Path, outcome: Outcome) -> Report:
    if outcome.ok:
        try:
            return Report.model_validate_json(read_left_behind(folder / "report.json", LIMITS.output_bytes))
        except (OSError, ValueError) as error:
            raise StageSkipped(f"the training's report is unreadable: {str(error)[:300]}") from None
    last = outcome.stderr_tail.strip().splitlines()[-1:]
    raise StageSkipped(f"the model did not train under the runtime here: {outcome.reason} {' '.join(last)}"[:500])


def labels_of(architecture: Architecture) -> list[str]:
    """For each layer of the published model the number of its block kind: two kinds may share a letter."""
    by_layer = {layer: str(n) for n, block in enumerate(architecture.blocks) for layer in block.layers}
    return [by_layer.get(layer, "") for layer in range(architecture.num_layers)]


def _result(
    architecture: Architecture,
    align: AlignResult,
    job: dict[str, Any],
    report: Report,
    *,
    kernels: int,
    begun: float,
) -> ThroughputResult:
    cpu = job["device"] == "cpu"
    device = None if cpu else device_named(align.device)
    tokens = job["batch"] * job["sequence_length"]
    runs = [_training(run, tokens, device) for run in report.runs]
    speedup = runs[-1].tokens_per_second / runs[0].tokens_per_second if len(runs) > 1 else None
    last = report.runs[-1]
    breakdown = _breakdown(architecture, last)
    speed = f"{runs[-1].tokens_per_second:,.0f} tokens/s {runs[-1].name}"
    summary = f"{'reduced twin' if cpu else 'slice'} on {align.device}: {speed}"
    if speedup is not None:
        summary += f", {speedup:.2f} x"
    if cpu:
        summary += "; no GPU, so no kernel was timed"
    what = ", ".join(f"{name} {value}" for name, value in report.sizes.items())
    return ThroughputResult(
        summary=summary,
        trained="twin" if cpu else "slice",
        words=f"{'reduced twin' if cpu else 'slice of the published width'}: {what}",
        sizes=report.sizes,
        device=align.device,
        dtype="float32" if cpu else "bfloat16",
        adapters=job["adapters"],
        batch=job["batch"],
        sequence_length=job["sequence_length"],
        flops_per_token=report.runs[0].flops_per_token,
        runs=runs,
        speedup=speedup,
        breakdown=breakdown,
        breakdown_of=runs[-1].name,
        breakdown_ms=sum(row.forward_ms + row.backward_ms for row in breakdown),
        points=[] if device is None else _points(architecture, breakdown, runs[-1].name, tokens, device),
        roofline=None
        if device is None
        else Roofline(tflops=device.tflops, bandwidth=device.bandwidth, basis=device.basis),
        lengths=longer(architecture, report, cpu=cpu) if report.lengths else None,
        not_measured=[
            *([] if report.lengths else [f"Growing contexts: {report.lengths_reason or QUICK}."]),
            *([f"The run with the bundle failed: {report.bundle_failure}"] if report.bundle_failure else []),
            *not_measured(cpu=cpu, kernels=kernels, known=device is not None, device=align.device),
        ],
        corpus=CORPUS,
        seconds=round(time.monotonic() - begun, 1),
    )


def longer(architecture: Architecture, report: Report, *, cpu: bool) -> Lengths:
    """How memory and error grow, beside the law of the traced model."""
    rows = [LengthRow.model_validate(row.model_dump()) for row in report.lengths]
    found = wanted = error = None
    parts = []
    if len(rows) >= 3:
        found = exponent([float(row.bytes) for row in rows])
        law = architecture.memory
        if law is not None:
            growth = law.activations if cpu else law.recomputed
            wanted = exponent([growth.at(row.tokens) for row in rows])
        parts.append(f"memory grows with the length to the power of {found:.2f}")
        if wanted is not None:
            as_wanted = abs(found - wanted) <= AS_THE_LAW
            parts.append(f"{'as' if as_wanted else 'NOT as'} the traced model's law says ({wanted:.2f})")
    errors = [row.gradient_error for row in rows]
    if len(rows) >= 2 and errors[0] and errors[-1]:
        error = log2(errors[-1] / errors[0]) / log2(rows[-1].tokens / rows[0].tokens)
        steady = "no faster than a random walk" if error <= RANDOM_WALK else "FASTER than a random walk"
        parts.append(f"the gradients' error in float32 grows with the power of {error:.2f}, {steady}")
    if not all(isfinite(row.loss) for row in rows):
        parts.append("a loss is NOT finite")
    words = f"{rows[0].tokens:,} to {rows[-1].tokens:,} tokens: {', '.join(parts) or 'too few lengths to tell a law'}"
    return Lengths(rows=rows, exponent=found, expected=wanted, error_exponent=error, words=words)


def _training(run: Run, tokens: int, device: Device | None) -> Training:
    seconds = run.median_ms / 1e3
    tflops = run.flops_per_token * tokens / seconds / 1e12
    return Training(
        name="with the bundle" if run.bundle else "without the bundle",
        tokens_per_second=tokens / seconds,
        step_ms=run.median_ms,
        fastest_ms=min(run.times_ms),
        slowest_ms=max(run.times_ms),
        steps=len(run.times_ms),
        tflops=tflops,
        mfu=None if device is None else tflops / device.peak_tflops,
        peak_bytes=run.peak_bytes,
        first_loss=run.losses[0],
        last_loss=run.losses[-1],
        kernels=run.kernels,
    )


def _breakdown(architecture: Architecture, run: Run) -> list[LayerTime]:
    blocks = {str(n): block for n, block in enumerate(architecture.blocks)}
    total = sum(row.forward_ms + row.backward_ms for row in run.breakdown) or 1.0
    rows = []
    for row in run.breakdown:
        block = blocks.get(row.label)
        rows.append(
            LayerTime(
                kind=f"{block.letter}: {block.mixer}, {block.feed_forward}" if block else row.label or "block",
                block=int(row.label) if block else None,
                layers=row.layers,
                forward_ms=row.forward_ms,
                backward_ms=row.backward_ms,
                share=(row.forward_ms + row.backward_ms) / total,
                parts=row.parts,
            )
        )
    return rows


def _points(
    architecture: Architecture, rows: list[LayerTime], run: str, tokens: int, device: Device
) -> list[RooflinePoint]:
    """FLOPs and bytes of each published block kind over its measured forward time."""
    points = []
    for row in rows:
        block = architecture.blocks[row.block] if row.block is not None else None
        if block is None or row.forward_ms <= 0 or not row.layers or block.bytes_moved <= 0:
            continue
        scale = tokens / architecture.sequence_length
        flops = block.growth.at(tokens) if block.growth is not None else block.flops * scale
        intensity = flops / (block.bytes_moved * scale)
        reached = flops * row.layers / (row.forward_ms / 1e3) / 1e12
        roof = min(device.tflops, intensity * device.bandwidth)
        points.append(RooflinePoint(kind=row.kind, run=run, intensity=intensity, tflops=reached, share=reached / roof))
    return points


def device_named(name: str) -> Device | None:
    """The roofline of a GPU by the name that its driver gives; None where there is none."""
    plain = name.upper().replace(" ", "")
    return next((device for key, device in DEVICES.items() if key.upper() in plain), None)


def not_measured(*, cpu: bool, kernels: int, known: bool, device: str) -> list[str]:
    """What this stage leaves open, and why."""
    if not cpu:
        sentences = ["One device was measured: what many devices reach is in the scale stage."]
        if not known:
            sentences.append(f"MFU and roofline points: no published peak of {device} is known here.")
        if not kernels:
            sentences.append("A run with the bundle: it holds no kernel.")
        return sentences
    return [
        "There is no GPU here. The figures are of the reduced twin in plain torch on one CPU core: they say that it "
        "trains and where its time goes, nothing of the published model's speed.",
        "The bundle's kernels run on Triton's interpreter here; the time of an interpreter is no speed, so no run "
        "with the bundle was timed. That the twin trains right with them is what align proves.",
        "MFU and roofline points: a CPU core has no published peak to compare with.",
    ]
