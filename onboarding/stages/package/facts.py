"""Everything a job established, collected once: what report and bundle are written from. Free of torch."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import Field

from onboarding.architecture import OperatorUse, Record
from onboarding.context import StageContext, StageResult
from onboarding.policy import RoleCost
from onboarding.stages.align.result import AlignResult
from onboarding.stages.gaps.result import GapsResult, OperatorRow
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale.result import ScaleResult
from onboarding.stages.throughput.result import ThroughputResult
from onboarding.stages.tune.result import TuneResult

R = TypeVar("R", bound=StageResult)


class Kernel(Record):
    """One gap and what became of it."""

    digest: str
    words: str
    row: OperatorRow
    uses: list[OperatorUse]
    generated: GenerateResult | None
    verdict: JudgeResult | None
    tuned: TuneResult | None
    shipped: bool
    fate: str
    """In words: shipped, refused by the judge, dropped by alignment ..."""


class Facts(Record):
    """A job's findings."""

    job_id: str
    profile: str
    intake: IntakeResult
    parse: ParseResult
    gaps: GapsResult
    kernels: list[Kernel]
    align: AlignResult
    throughput: ThroughputResult | None = None
    """None where nothing was trained; ``not_measured`` says why."""
    scale: ScaleResult | None = None
    not_measured: list[str]
    """What this job did not measure, and why, one sentence each."""
    narrative: str = ""
    """A language model's summary, every number of which was found in the record; empty without one."""
    costs: list[RoleCost] = Field(default_factory=list)
    """What the job's agents spent, by role."""

    @property
    def shipped(self) -> list[Kernel]:
        """The kernels that go into the bundle."""
        return [k for k in self.kernels if k.shipped]


def brief(facts: Facts) -> dict[str, Any]:
    """What a summary may be written from: the job's findings, short."""
    census, align = facts.parse.architecture.census, facts.align
    return {
        "model": facts.intake.name,
        "parameters": census.total,
        "active parameters": census.active,
        "layers": facts.parse.architecture.num_layers,
        "novel modules": {named.module: named.words for named in facts.gaps.novel},
        "kernels": [
            {"operator": k.words, "fate": k.fate, "share of the step": k.row.share_time}
            | ({"worst error of its tolerance": k.verdict.worst_share, "level": k.verdict.level} if k.verdict else {})
            for k in facts.kernels
        ],
        "shipped": len(facts.shipped),
        "alignment": {"steps": len(align.curves.steps), "summary": align.summary, "worst layer": align.worst_share},
        **({"throughput": facts.throughput.summary} if facts.throughput else {}),
        **({"scale": facts.scale.summary} if facts.scale else {}),
        "not measured": facts.not_measured,
    }


def collect(context: StageContext) -> Facts:
    """Read all upstream results of the job.

    Raises:
        LookupError: an upstream stage has not finished.
    """
    parse = context.result("parse", ParseResult)
    gaps = context.result("gaps", GapsResult)
    align = context.result("align", AlignResult)
    rows = {row.digest: row for row in gaps.rows if row.digest}
    known = [*parse.architecture.uses, *gaps.uses]
    kernels = [_kernel(context, rows[digest], known, align) for digest in gaps.gaps]
    throughput = _found(context, "throughput", ThroughputResult)
    scale = _found(context, "scale", ScaleResult)
    return Facts(
        job_id=context.job_id,
        profile=context.profile.name,
        intake=context.result("intake", IntakeResult),
        parse=parse,
        gaps=gaps,
        kernels=kernels,
        align=align,
        throughput=throughput,
        scale=scale,
        not_measured=_not_measured(kernels, align, throughput, scale),
    )


def _found(context: StageContext, stage: str, model: type[R]) -> R | None:
    data = context.load_result(stage, "")
    return model.model_validate(data) if data and data.get("outcome") != "skipped" else None


def _kernel(context: StageContext, row: OperatorRow, known: list[OperatorUse], align: AlignResult) -> Kernel:
    generated = context.load_result("generate", row.digest)
    judged = context.load_result("judge", row.digest)
    tuned = context.load_result("tune", row.digest)
    verdict = JudgeResult.model_validate(judged) if judged else None
    accepted = verdict is not None and verdict.outcome == "accepted"
    dropped = row.digest in align.dropped
    if verdict is None:
        fate = "no candidate was judged: served by torch"
    elif not accepted:
        fate = "refused by the judge: served by torch"
    elif dropped and any("never calls" in note and row.digest in note for note in align.notes):
        fate = "accepted, but the reduced twin never calls it, so it is not proven in a model: served by torch"
    elif dropped:
        fate = "accepted, then dropped by alignment: served by torch"
    else:
        fate = "shipped"
    return Kernel(
        digest=row.digest,
        words=row.name,
        row=row,
        uses=[use for use in known if use.digest == row.digest],
        generated=GenerateResult.model_validate(generated) if generated else None,
        verdict=verdict,
        tuned=TuneResult.model_validate(tuned) if tuned else None,
        shipped=accepted and not dropped,
        fate=fate,
    )


def _not_measured(
    kernels: list[Kernel], align: AlignResult, throughput: ThroughputResult | None, scale: ScaleResult | None
) -> list[str]:
    sentences = []
    if any(k.shipped and k.verdict is not None and k.verdict.level == "interpreted" for k in kernels):
        sentences.append(
            "Kernels were judged on Triton's interpreter on a CPU: their numerics are proven, their compiled code is "
            "not. On a GPU the bundle refuses them until they were judged there."
        )
    if any(k.shipped and k.tuned is None for k in kernels):
        sentences.append("No kernel was timed or tuned: there was no GPU. Shipped configurations are the family's.")
    if align.device == "cpu":
        sentences.append(
            f"Alignment ran on the reduced twin in {align.dtype} on a CPU, not on the full model in bfloat16 on a GPU."
        )
    sentences.append("Shares of the step time in section 3 are projections.")
    sentences += throughput.not_measured if throughput else ["Throughput: the model was not trained under the runtime."]
    if scale is None:
        return [*sentences, "Scaling: nothing was planned for several devices."]
    sentences += scale.not_measured
    if scale.dry_reason:
        sentences.append(f"Dry run: {scale.dry_reason}.")
    if scale.gloo_reason:
        sentences.append(f"Runs over several processes: {scale.gloo_reason}.")
    return sentences
