"""One operator's search without the service: generate and judge in turn until accepted or given up.

For evaluation and experiments: the same graph, ladder, judge, ledger and budget as in a job, in a home of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.checkpoints import open_checkpointer
from agents.choose import policy_for
from agents.kernel_search import run_step
from agents.llm.caller import Who
from agents.llm.endpoint import Sender
from kernel_templates.spec import OperatorSpec
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import EDGES, PROFILES, JobOptions
from onboarding.policy import Try
from onboarding.problem import StageSkipped
from onboarding.settings import Settings
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.store import Purse, Store

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Solved:
    """What came of a search."""

    accepted: bool
    reason: str
    """Of giving up."""
    verdict: JudgeResult | None
    source: str
    """The accepted candidate; empty for none."""
    tries: list[Try]
    spent: Purse
    job_id: str


@dataclass(kw_only=True)
class Solo:
    """A home for searches without a service.

    Args:
        settings: ``settings.home`` is a folder of its own: a service on it would take the job for one of its own.
        send: carries requests to the language model; the OpenAI SDK by default.
    """

    settings: Settings
    options: JobOptions = field(default_factory=JobOptions)
    send: Sender | None = None
    say: Say = print

    def __post_init__(self) -> None:
        self.store = Store(self.settings.resolved_database_url())
        self.store.migrate()
        self.artifacts = ArtifactStore(self.settings.resolved_artifacts_url())

    def job(self, spec: OperatorSpec) -> str:
        """The job on whose account an operator is searched: the same one when a search is taken up again."""
        name = f"solo {spec.digest()}"
        known = self.store.list_jobs("solo", name=name).jobs
        if known:
            return known[0].id
        made = self.store.create_job(
            name=name, model_type="none", owner="solo", definition=spec.digest(), options=self.options
        )
        return made.id

    def search(self, spec: OperatorSpec) -> Solved:
        """Search one operator to its end; a search that was interrupted goes on where it stood."""
        job_id, key = self.job(spec), spec.digest()
        results: dict[str, dict[str, Any]] = {"gaps": gaps_of(spec)}
        rounds = 1 + next(edge.limit for edge in EDGES if edge.stage == "judge" and edge.to == "generate")
        verdict: JudgeResult | None = None
        for attempt in range(1, rounds + 1):
            try:
                generated = run_step(self._context(job_id, key, "generate", attempt, results))
            except StageSkipped as reason:
                return self._solved(spec, job_id, verdict, results, str(reason))
            results["generate"] = generated.model_dump(mode="json")
            self.say(f"{spec.words()}: {generated.summary}")
            judged = run_step(self._context(job_id, key, "judge", attempt, results))
            assert isinstance(judged, JudgeResult)
            verdict = judged
            self.say(f"{spec.words()}: {judged.summary}")
            if judged.outcome == "accepted" or judged.next_move != "repair":
                break
        return self._solved(
            spec,
            job_id,
            verdict,
            results,
            "" if verdict and verdict.outcome == "accepted" else "the judge refused every candidate",
        )

    def _solved(
        self, spec: OperatorSpec, job_id: str, verdict: JudgeResult | None, results: dict[str, Any], reason: str
    ) -> Solved:
        accepted = verdict is not None and verdict.outcome == "accepted"
        source = ""
        if accepted:
            digest = GenerateResult.model_validate(results["generate"]).candidate.digest
            source = self.artifacts.get(digest).decode()
        return Solved(
            accepted=accepted,
            reason="" if accepted else reason,
            verdict=verdict,
            source=source,
            tries=self.tries(job_id, spec.digest()),
            spent=self.store.spent(job_id=job_id),
            job_id=job_id,
        )

    def tries(self, job_id: str, key: str) -> list[Try]:
        """What a search tried so far."""
        with open_checkpointer(self.settings) as saver:
            found = saver.get({"configurable": {"thread_id": f"{job_id}:{key}"}})
        values = found["channel_values"] if found else {}
        return [Try.model_validate(t) for t in values.get("tries", [])]

    def _context(
        self, job_id: str, key: str, stage: str, attempt: int, results: dict[str, dict[str, Any]]
    ) -> StageContext:
        who = Who(job_id=job_id, project=self.options.project, stage=stage, key=key, attempt=attempt)
        scratch = self.settings.resolved_home / "solo" / job_id / f"{stage}-{attempt}"
        fresh(scratch)
        return StageContext(
            job_id=job_id,
            job_name=key,
            stage=stage,
            key=key,
            attempt=attempt,
            options=self.options,
            profile=PROFILES[self.options.profile],
            settings=self.settings,
            scratch=scratch,
            artifacts=self.artifacts,
            policy=policy_for(self.settings, self.store, who, self.options, results["gaps"], self.send),
            emit=lambda kind, **data: None,
            load_result=lambda stage, key: results.get(stage),
        )


def fresh(folder: Path) -> None:
    """Make an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def gaps_of(spec: OperatorSpec) -> dict[str, Any]:
    """A gap analysis with one operator in it."""
    return {"gaps": [spec.digest()], "rows": [{"digest": spec.digest(), "spec": spec.to_dict(), "saving_ms": 1.0}]}
