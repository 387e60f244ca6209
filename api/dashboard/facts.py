"""Everything that the pages of one job show, read and typed once per request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError

from api.agents import AgentView, Chapter, agent_view, story
from api.dashboard.formats import STATE_WORDS
from api.views import JobDetail, job_detail, newest_attempts
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageResult
from onboarding.records import Artifact, Job, LedgerEntry, Step
from onboarding.stages.align.result import AlignResult, Curves
from onboarding.stages.gaps.result import GapsResult, OperatorRow
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.package.result import PackageResult
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale.result import ScaleResult
from onboarding.stages.throughput.result import ThroughputResult
from onboarding.stages.tune.result import TuneResult
from onboarding.store import Store

R = TypeVar("R", bound=StageResult)


@dataclass(frozen=True)
class Kernel:
    """One operator on its way to a kernel."""

    key: str
    row: OperatorRow | None
    steps: dict[str, Step]
    """Stage name -> newest attempt."""
    generate: GenerateResult | None
    judge: JudgeResult | None
    tune: TuneResult | None

    @property
    def words(self) -> str:
        """The operator in words."""
        return self.generate.words if self.generate else self.row.name if self.row else self.key[:12]

    @property
    def verdict(self) -> str:
        """``accepted``, ``refused``, or where the operator is."""
        if self.judge is not None:
            return self.judge.outcome
        newest = list(self.steps.values())[-1] if self.steps else None
        if newest is None:
            return "waiting"
        return "failed" if newest.state == "failed" else f"{newest.stage} {STATE_WORDS[newest.state]}"


class JobFacts:
    """A job with its typed results."""

    def __init__(self, store: Store, job: Job, artifact_store: ArtifactStore | None = None) -> None:
        self.store = store
        self.artifact_store = artifact_store
        self.job = job
        self.steps = store.steps(job.id)
        self._newest = {(step.stage, step.key): step for step in newest_attempts(self.steps)}

    @cached_property
    def detail(self) -> JobDetail:
        """The job as the API shows it."""
        return job_detail(self.job, self.steps, self.store.latest_progress(self.job.id))

    def result(self, stage: str, model: type[R], key: str = "") -> R | None:
        """A stage's newest result; None if there is none or an older version of Onboard wrote it."""
        step = self._newest.get((stage, key))
        if step is None or step.result is None or step.state != "succeeded":
            return None
        try:
            return model.model_validate(step.result)
        except ValidationError:
            return None

    @cached_property
    def intake(self) -> IntakeResult | None:
        """The checked definition."""
        return self.result("intake", IntakeResult)

    @cached_property
    def parse(self) -> ParseResult | None:
        """The architecture."""
        return self.result("parse", ParseResult)

    @cached_property
    def gaps(self) -> GapsResult | None:
        """Operators and gaps."""
        return self.result("gaps", GapsResult)

    @cached_property
    def align(self) -> AlignResult | None:
        """Layer errors and loss curves."""
        return self.result("align", AlignResult)

    @cached_property
    def throughput(self) -> ThroughputResult | None:
        """Timed training with and without the bundle."""
        return self.result("throughput", ThroughputResult)

    @cached_property
    def scale(self) -> ScaleResult | None:
        """Plans and projection for many devices."""
        return self.result("scale", ScaleResult)

    def why_skipped(self, stage: str) -> str:
        """Why a stage was skipped; empty if it was not."""
        step = self._newest.get((stage, ""))
        return str((step.result or {}).get("summary", "")) if step is not None and step.state == "skipped" else ""

    @cached_property
    def package(self) -> PackageResult | None:
        """The bundle."""
        return self.result("package", PackageResult)

    @cached_property
    def ledger(self) -> list[LedgerEntry]:
        """What the job's agents spent."""
        return self.store.ledger(self.job.id)

    @cached_property
    def agent(self) -> AgentView:
        """Sums, entries, and what waits for a person."""
        return agent_view(self.ledger, self.steps)

    @cached_property
    def story(self) -> dict[str, list[Chapter]]:
        """The ledger as a story, by operator."""
        assert self.artifact_store is not None
        return story(self.ledger, self.artifact_store)

    def words_of(self, key: str) -> str:
        """An operator in words; empty for the whole job."""
        kernel = self.kernel(key) if key else None
        return kernel.words if kernel else key[:12]

    @cached_property
    def artifacts(self) -> list[Artifact]:
        """Stored artifacts."""
        return self.store.artifacts(self.job.id)

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Every operator that gets a kernel, in the order of the gaps."""
        keys = list(self.gaps.gaps) if self.gaps else []
        keys += [step.key for step in self.steps if step.key and step.key not in keys]
        return [kernel for key in dict.fromkeys(keys) if (kernel := self.kernel(key)) is not None]

    def kernel(self, key: str) -> Kernel | None:
        """One operator by its digest."""
        row = next((row for row in self.gaps.rows if row.digest == key), None) if self.gaps else None
        steps = {stage: step for (stage, step_key), step in self._newest.items() if step_key == key and key}
        if row is None and not steps:
            return None
        return Kernel(
            key=key,
            row=row,
            steps=steps,
            generate=self.result("generate", GenerateResult, key),
            judge=self.result("judge", JudgeResult, key),
            tune=self.result("tune", TuneResult, key),
        )

    def curves(self) -> Curves | None:
        """The loss curves: from the result, else from the live metrics while alignment runs."""
        if self.align is not None:
            return self.align.curves
        series: dict[str, dict[float, float]] = {}
        for event in self.store.metrics(self.job.id, "align"):
            # A repeated attempt sends its points again: the last one counts.
            points = series.setdefault(str(event.data["series"]), {})
            points[float(event.data["step"])] = float(event.data["value"])
        reference, candidate = (self._series(series, word) for word in ("reference", "candidate"))
        steps = sorted(set(reference) & set(candidate)) if candidate else sorted(reference)
        if not steps:
            return None
        return Curves(
            steps=[int(step) for step in steps],
            reference=[reference[step] for step in steps],
            candidate=[candidate.get(step, float("nan")) for step in steps],
            band=[0.0] * len(steps),
            band_basis="live: the band comes with the result",
        )

    @staticmethod
    def _series(series: dict[str, dict[float, float]], word: str) -> dict[float, float]:
        return next((points for name, points in series.items() if word in name), {})
