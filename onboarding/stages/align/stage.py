"""Align: the reduced twin with the bundle's kernels against the same twin without, by layer and by loss curve."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.custom_code.definition import definition_of
from onboarding.stages.align import bisect, curves
from onboarding.stages.align.child import Job
from onboarding.stages.align.result import AlignResult, Curves
from onboarding.stages.align.trial import Bench, Candidate, Reference
from onboarding.stages.package.trial import accepted, write_trial_bundle
from onboarding.stages.parse.result import ParseResult
from onboarding.twin.confined import derive_twin
from onboarding.twin.plan import TwinPlan
from runtime.data import corpus_words, standard_library_sources

BATCH = 2
LEARNING_RATE = 1e-3
NUDGES = {"quick": 2}
"""Nudged reference runs by profile; the others take 3."""
GPU_SEQUENCE = 4 * 64 + 8
"""Four chunks of 64 and a ragged end: compiled kernels use longer chunks than interpreted ones."""


def run(context: StageContext) -> AlignResult:
    """Align the accepted kernels with the reference implementation.

    Raises:
        LookupError: an upstream stage has not finished.
        Problem: no twin can be derived, or the reference itself does not run.
    """
    started = time.monotonic()
    definition = definition_of(context)
    architecture = context.result("parse", ParseResult).architecture
    dropped = [str(digest) for digest in context.input.get("dropped", [])]
    digests = [d for d in accepted(context) if d not in dropped]
    device = _device(context)
    length = context.profile.sequence_length if device == "cpu" else max(context.profile.sequence_length, GPU_SEQUENCE)

    context.progress(0, 1, "deriving the reduced twin")
    plan = derive_twin(
        definition,
        layers_at_least=context.profile.twin_layers,
        sequence_length=length,
        scratch=context.scratch,
        unsafe=context.settings.unsafe_no_sandbox,
    )
    bundle = write_trial_bundle(context, architecture, digests)
    bench = Bench(
        job=Job(
            plan=plan.to_json(),
            weights="float32" if device == "cpu" else "bfloat16",
            device=device,
            seed=context.options.seed,
            batch=BATCH,
            sequence_length=length,
            steps=context.profile.train_steps,
            lr=LEARNING_RATE,
            bundle=str(bundle),
            code=str(definition.code.resolve()) if definition.code else None,
            runs=[],
        ),
        low="float32" if device == "cpu" else "bfloat16",
        high="float64" if device == "cpu" else "float32",
        nudges=NUDGES.get(context.profile.name, 3),
        letters=_letters(architecture, plan),
        scratch=context.scratch,
        unsafe=context.settings.unsafe_no_sandbox,
    )
    progress = _Progress(context, bench)
    reference, candidate = bench.both(digests, progress)
    guilty = _culprits(context, bench, digests, reference, candidate) if candidate.fails(reference) else []
    return _result(context, bench, plan, reference, candidate, dropped, guilty, time.monotonic() - started)


class _Progress:
    """Turns the children's lines into one progress bar and two live curves."""

    def __init__(self, context: StageContext, bench: Bench) -> None:
        self.context = context
        self.per_run = bench.job.steps + 1
        self.total = self.per_run * (3 + bench.nudges)
        self.high = bench.high
        self.done: dict[str, int] = {}

    def __call__(self, run: str, step: int, loss: float) -> None:
        self.done[run] = min(step + 1, self.per_run)
        if step and run in ("low", "candidate"):
            self.context.metric("loss.reference" if run == "low" else "loss.candidate", step, loss)
        label = "layers" if step == 0 else f"step {step} of {self.per_run - 1}"
        names = {"low": "reference", "high": f"reference in {self.high}", "candidate": "candidate"}
        self.context.progress(sum(self.done.values()), self.total, f"{names.get(run, 'nudged reference')}: {label}")


def _device(context: StageContext) -> str:
    if context.options.device == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _letters(architecture: Architecture, plan: TwinPlan) -> list[str]:
    by_layer = {layer: block.letter for block in architecture.blocks for layer in block.layers}
    return [by_layer.get(layer, "") for layer in plan.layers]


def _culprits(
    context: StageContext, bench: Bench, digests: Sequence[str], reference: Reference, candidate: Candidate
) -> list[str]:
    """Halve the set of kernels until the guilty are found, by the cheapest evidence that shows the fault."""
    if not digests:
        return []
    steps = 0 if candidate.layers_fail else bench.job.steps
    tries = 0

    def fails(part: Sequence[str]) -> bool:
        nonlocal tries
        tries += 1
        context.progress(tries, 2 * len(digests), f"bisecting: {len(part)} of {len(digests)} kernels")
        ran = bench.candidate(f"bisect{tries}", part, steps, lambda run, step, loss: None)
        return bench.measure(ran, steps, reference).fails(reference)

    return bisect.culprits(digests, fails)


def _result(
    context: StageContext,
    bench: Bench,
    plan: TwinPlan,
    reference: Reference,
    candidate: Candidate,
    dropped: list[str],
    guilty: list[str],
    seconds: float,
) -> AlignResult:
    own, steps = reference.losses[0], bench.job.steps
    worst = max(candidate.rows, key=lambda row: row.share, default=None)
    complete = not candidate.failure
    inside = complete and curves.inside(candidate.losses, own, reference.band)
    p = curves.p_value(candidate.losses, reference.losses) if complete else 0.0
    misaligned = candidate.fails(reference)
    idle = [digest for digest, count in candidate.ran.items() if count == 0] + sorted(
        set(accepted(context)) - set(dropped) - set(candidate.ran)
    )
    notes = list(candidate.notes)
    if candidate.failure:
        notes.insert(0, f"the twin with kernels did not run: {candidate.failure}")
    if not misaligned and idle:
        notes.append(f"the twin never calls {', '.join(idle)}: not proven in a model, so torch keeps serving them")
    where = f"{worst.kind} {worst.name}" if worst else "nowhere"
    if misaligned:
        summary = f"misaligned: {where} at {worst.share:.3g} of tolerance" if worst else "misaligned: did not run"
    else:
        share = worst.share if worst else 0.0
        summary = f"{steps} steps: curve inside the band (p = {p:.2g}), worst layer {share:.2g} of tolerance"
    return AlignResult(
        outcome="misaligned" if misaligned else "ok",
        summary=summary,
        twin=plan.sizes,
        twin_plan=plan.to_json(),
        device="cpu" if bench.job.device == "cpu" else torch.cuda.get_device_name(),
        dtype=bench.low,
        layers=candidate.rows,
        curves=Curves(
            steps=list(range(1, steps + 1)),
            reference=own,
            candidate=candidate.losses,
            band=reference.band,
            band_basis=(
                f"1.5 x the largest difference so far between {len(reference.losses)} reference runs in {bench.low}, "
                f"whose weights differ by less than one unit in the last place, and one in {bench.high}"
            ),
        ),
        worst_share=worst.share if worst else 0.0,
        worst_where=where,
        inside_band=inside,
        p_value=p,
        swapped={digest: count for digest, count in candidate.ran.items() if count},
        dropped=dropped if misaligned else [*dropped, *idle],
        culprits=guilty,
        notes=notes,
        corpus=corpus_words(standard_library_sources()),
        seconds=seconds,
    )
