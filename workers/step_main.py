"""A step's own process, the only place that imports stages: ``python -m workers.step_main STEP_ID FOLDER``.

It runs the stage and leaves what came of it in ``FOLDER/outcome.json``; the supervisor reads that and records it. It
never writes a step's row, so a process that lost its lease can change nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext, StageResult
from onboarding.pipeline import PROFILES, STAGE_BY_NAME, JobOptions
from onboarding.policy import Policy, RulePolicy
from onboarding.problem import Problem, StageSkipped
from onboarding.records import Job, Step
from onboarding.settings import Settings
from onboarding.store import Store, log_path
from workers.environment import OUTCOME_FILE, check_packages, clean_environment
from workers.events import EventWriter, json_safe
from workers.narrate import Narrator, say

GRAPHS = {"gaps": "architect", "align": "diagnose", "throughput": "diagnose"}
"""Stages that are a part of a graph in ``agents``, beside those that work per operator."""


def main(step_id: int, folder: Path) -> None:
    """Run one step."""
    clean_environment()
    settings = Settings()
    store = Store(settings.resolved_database_url())
    step = store.get_step(step_id)
    job = store.get_job(step.job_id) if step is not None else None
    if step is None or job is None:
        raise SystemExit(f"no step {step_id}")
    outcome = run(settings, store, job, step, folder)
    aside = folder / f"{OUTCOME_FILE}.part"
    aside.write_text(json.dumps(outcome, allow_nan=False))
    os.replace(aside, folder / OUTCOME_FILE)
    store.close()


def run(settings: Settings, store: Store, job: Job, step: Step, folder: Path) -> dict[str, Any]:
    """The stage's outcome: ``state`` and, as the case may be, ``result`` or ``problem``."""
    events = EventWriter(store, job.id, step.stage, step.key)
    try:
        try:
            return _attempt(settings, store, job, step, folder, events)
        finally:
            events.close()
    except Problem as problem:
        traceback.print_exc()
        return {"state": "failed", "problem": json_safe(problem.to_dict())}
    except Exception as error:
        traceback.print_exc()
        log = log_path(settings, job.id, step.stage, step.key, step.attempt)
        crash = Problem(
            "stage-crashed",
            f"{step.stage} failed: {type(error).__name__}: {error}"[:500],
            f"The traceback is in logs/{job.id}/{log.name}. `onboard retry {job.id}` goes on from here.",
            status=500,
        )
        return {"state": "failed", "problem": crash.to_dict()}


def _attempt(
    settings: Settings, store: Store, job: Job, step: Step, folder: Path, events: EventWriter
) -> dict[str, Any]:
    scratch = folder / "scratch"
    scratch.mkdir()
    options = JobOptions.model_validate(job.options)
    context = StageContext(
        job_id=job.id,
        job_name=job.name,
        stage=step.stage,
        key=step.key,
        attempt=step.attempt,
        options=options,
        profile=PROFILES[options.profile],
        settings=settings,
        scratch=scratch,
        artifacts=ArtifactStore(settings.resolved_artifacts_url()),
        policy=policy_of(settings, store, job, step, options),
        emit=Narrator(events.emit),
        load_result=partial(store.load_result, job.id),
        earlier=partial(store.earlier_results, job.id),
        definition=job.definition,
        input=dict(step.input),
    )
    say(f"{step.stage} begins, attempt {step.attempt}{', ' + step.key if step.key else ''}")
    try:
        result = stage_function(settings.stages_package, step.stage)(context)
    except StageSkipped as skipped:
        say(f"skipped: {skipped}")
        return {"state": "skipped", "result": {"outcome": "skipped", "summary": str(skipped)}}
    say(result.summary or result.outcome)
    return {"state": "succeeded", "result": json_safe(result.model_dump(mode="json"))}


def policy_of(settings: Settings, store: Store, job: Job, step: Step, options: JobOptions) -> Policy:
    """Rules, or the language model that is configured and wanted. Only steps that may ask it load the client."""
    if options.policy == "rules" or (options.policy == "auto" and not settings.llm.configured):
        return RulePolicy()
    check_packages()
    from agents.choose import policy_for
    from agents.llm.caller import Who

    who = Who(job_id=job.id, project=options.project, stage=step.stage, key=step.key, attempt=step.attempt)
    return policy_for(settings, store, who, options, store.load_result(job.id, "gaps"))


def stage_function(package: str, stage: str) -> Callable[[StageContext], StageResult]:
    """What runs a stage: the graph that it is a part of, else the stage's own ``run``."""
    graph = "kernel_search" if STAGE_BY_NAME[stage].per_operator else GRAPHS.get(stage)
    if package == Settings.model_fields["stages_package"].default and graph:
        check_packages()
        module = importlib.import_module(f"agents.{graph}")
        return module.run_step  # type: ignore[no-any-return]  # imported by name to keep parents free of it
    return importlib.import_module(f"{package}.{stage}.stage").run  # type: ignore[no-any-return]  # imported by name


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
