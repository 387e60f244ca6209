"""Intake, parse and gaps without a service, for ``onboard parse``: ``python -m onboarding.local WHAT TOKENS TARGET``.

Prints one JSON object a line: ``progress`` while it works, then one ``result`` or ``problem``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.problem import Problem
from onboarding.settings import Settings
from onboarding.stages.intake.check import find_definition


def run(what: str, options: JobOptions, folder: Path) -> dict[str, Any]:
    """Run the first three stages in this process.

    Raises:
        Problem: intake or parse refuses the definition.
    """
    from onboarding.stages.gaps.stage import run as gaps
    from onboarding.stages.intake.stage import run as intake
    from onboarding.stages.parse.stage import run as parse

    checked = find_definition(what)
    artifacts = ArtifactStore((folder / "artifacts").as_uri())
    name, media_type, content = checked.stored()
    definition = artifacts.put(content, name=name, media_type=media_type)
    results: dict[str, Any] = {"intake": None, "parse": None, "gaps": None}
    reasons: list[str] = []
    for stage, function in (("intake", intake), ("parse", parse), ("gaps", gaps)):
        scratch = folder / stage
        scratch.mkdir()

        def emit(kind: str, *, stage: str = stage, **data: Any) -> None:
            if kind == "progress":
                say("progress", stage=stage, label=str(data.get("label", "")))

        context = StageContext(
            job_id="local",
            job_name=checked.name or checked.model_type,
            stage=stage,
            key="",
            attempt=1,
            options=options,
            profile=PROFILES[options.profile],
            settings=Settings(),
            scratch=scratch,
            artifacts=artifacts,
            policy=RulePolicy(),
            emit=emit,
            load_result=lambda name, _key: results.get(name),
            definition=definition.digest,
        )
        try:
            results[stage] = function(context).model_dump(mode="json")
        except Problem as problem:
            if stage != "gaps":
                raise
            reasons.append(f"gaps: {problem.title}")
    return {**results, "reasons": reasons}


def say(kind: str, **data: Any) -> None:
    """Print one message."""
    print(json.dumps({"kind": kind, **data}), flush=True)


def main() -> None:
    """Entry point."""
    what, tokens, target = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="onboard-parse-") as folder:
        try:
            outcome = run(what, JobOptions(sequence_length=int(tokens), target=target), Path(folder))
            say("result", **outcome)
        except Problem as problem:
            say("problem", problem=problem.to_dict())


if __name__ == "__main__":
    main()
