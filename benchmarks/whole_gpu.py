"""``python -m benchmarks.whole_gpu DEFINITION --out DIR``: a job's stages in one process, on the GPU of this machine.

For machines where the service's own packages are not installed: intake to align run as a worker would run them, on the
same stage functions; judge and tune take one operator after another. Writes every stage's result and its seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.problem import Problem, StageSkipped
from onboarding.settings import Settings
from onboarding.stages.intake.check import find_definition

ONCE_BEFORE = ("intake", "parse", "gaps")
ONCE_AFTER = ("align", "throughput")
BY_OPERATOR = ("generate", "judge", "tune")


class Run:
    """The results so far, and what the next stage needs."""

    def __init__(self, what: str, options: JobOptions, folder: Path, settings: Settings) -> None:
        checked = find_definition(what)
        self.options, self.folder, self.settings = options, folder, settings
        self.artifacts = ArtifactStore((folder / "artifacts").as_uri())
        name, media_type, content = checked.stored()
        self.definition = self.artifacts.put(content, name=name, media_type=media_type).digest
        self.name = checked.name or checked.model_type
        self.results: dict[tuple[str, str], dict[str, Any]] = {}
        self.record: list[dict[str, Any]] = []

    def step(self, stage: str, key: str = "", **given: Any) -> dict[str, Any]:
        """Run one stage; its outcome is recorded, whatever it is."""
        scratch = self.folder / f"{stage}-{key or 'once'}-{len(self.record)}"
        scratch.mkdir(parents=True)
        context = StageContext(
            job_id="local",
            job_name=self.name,
            stage=stage,
            key=key,
            attempt=1,
            options=self.options,
            profile=PROFILES[self.options.profile],
            settings=self.settings,
            scratch=scratch,
            artifacts=self.artifacts,
            policy=RulePolicy(),
            emit=lambda kind, **data: None,
            load_result=lambda name, of: self.results.get((name, of)),
            definition=self.definition,
            input=given,
        )
        began = time.monotonic()
        row: dict[str, Any] = {"stage": stage, "key": key}
        try:
            result = importlib.import_module(f"onboarding.stages.{stage}.stage").run(context)
            self.results[stage, key] = result.model_dump(mode="json")
            row |= {"outcome": result.outcome, "summary": result.summary}
        except StageSkipped as skipped:
            row |= {"outcome": "skipped", "summary": str(skipped)}
        except Problem as problem:
            # a traceback's last lines say most
            row |= {"outcome": "failed", "summary": problem.title, "detail": problem.detail[-1500:]}
            print(problem.detail[-1500:], flush=True)
        except LookupError as missing:
            row |= {"outcome": "not run", "summary": str(missing)}
        row["seconds"] = round(time.monotonic() - began, 1)
        self.record.append(row)
        print(f"{row['seconds']:6.1f} s  {stage} {key[:8]} {row['outcome']}: {row['summary'][:200]}", flush=True)
        return row


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when the twin aligned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_gpu", description=__doc__)
    parser.add_argument("definition")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="standard", choices=sorted(PROFILES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--operators", type=int, default=100, help="operators that get a kernel")
    parser.add_argument("--tune", type=int, default=100, help="operators that are tuned")
    parser.add_argument("--jobs", type=int, default=4, help="verdicts side by side")
    parser.add_argument("--unsafe-no-sandbox", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(home=options.out / "home", unsafe_no_sandbox=options.unsafe_no_sandbox)
    run = Run(
        options.definition, JobOptions(profile=options.profile, device=options.device), options.out / "work", settings
    )
    for stage in ONCE_BEFORE:
        run.step(stage)
    keys: list[str] = run.results["gaps", ""]["gaps"][-options.operators :]
    for key in keys:
        run.step("generate", key)
    made = [key for key in keys if ("generate", key) in run.results]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda key: run.step("judge", key), made))
    accepted = [key for key in made if run.results.get(("judge", key), {}).get("outcome") == "accepted"]
    for key in accepted[: options.tune]:
        run.step("tune", key)
    for stage in ONCE_AFTER:
        run.step(stage)
    (options.out / "whole.json").write_text(json.dumps(run.record, indent=1) + "\n")
    named = {f"{stage} {key}".strip(): result for (stage, key), result in run.results.items() if stage != "parse"}
    (options.out / "results.json").write_text(json.dumps(named, indent=1) + "\n")
    return 0 if run.results.get(("align", ""), {}).get("outcome") == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
