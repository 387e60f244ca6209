"""The stage: from a stored artifact to a checked definition in normal form."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.examples import example_files
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.problem import Problem
from onboarding.settings import Settings
from onboarding.stages.intake.archive import normalised_tar, unpack
from onboarding.stages.intake.stage import run


def context_for(tmp_path: Path, definition: bytes) -> StageContext:
    artifacts = ArtifactStore(tmp_path.as_uri())
    stored = artifacts.put(definition, name="definition.tar", media_type="application/x-tar")
    return StageContext(
        job_id="job",
        job_name="kimi",
        stage="intake",
        key="",
        attempt=1,
        options=JobOptions(),
        profile=PROFILES["quick"],
        settings=Settings(home=tmp_path),
        scratch=tmp_path,
        artifacts=artifacts,
        policy=RulePolicy(),
        emit=lambda kind, **data: None,
        load_result=lambda stage, key: None,
        definition=stored.digest,
    )


def test_an_example_is_stored_in_normal_form(tmp_path: Path) -> None:
    files = {**example_files("kimi-linear"), "tokenizer.json": b"{}", "README.md": b"hello"}
    context = context_for(tmp_path, normalised_tar({f"kimi/{name}": data for name, data in files.items()}))
    result = run(context)
    assert result.model_type == "kimi_linear"
    assert (result.has_code, result.has_tokenizer, result.files) == (False, True, sorted(files))
    assert unpack(context.artifacts.get(result.definition.digest)) == files
    assert run(context) == result


def test_a_refused_definition_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(Problem) as caught:
        run(context_for(tmp_path, normalised_tar({"config.json": b"{}"})))
    assert caught.value.kind == "config-no-model-type"
