"""Dry run and real processes, as the stage starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.custom_code.definition import Definition
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.settings import Settings
from onboarding.stages.scale import dry, gloo
from onboarding.stages.scale.stage import run
from onboarding.twin.search import derive
from tests.api.story import align_result, architecture

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-30b-a3b" / "config.json"


@pytest.fixture(scope="module")
def twin() -> Any:
    return derive(json.loads(EXAMPLE.read_text()), layers_at_least=2, sequence_length=32)


def context(folder: Path, profile: str = "quick", **results: dict[str, Any]) -> StageContext:
    scratch = folder / "scratch"
    scratch.mkdir()
    return StageContext(
        job_id="job", job_name="m", stage="scale", key="", attempt=1, options=JobOptions(device="cpu"),
        profile=PROFILES[profile].model_copy(update={"sequence_length": 32}), settings=Settings(home=folder),
        scratch=scratch, artifacts=ArtifactStore(f"file://{folder}/artifacts"), policy=RulePolicy(),
        emit=lambda kind, **data: None, load_result=lambda stage, key: results.get(stage),
    )  # fmt: skip


@pytest.mark.sandbox
def test_first_and_last_rank_are_stepped_on_fake_tensors(twin: Any, tmp_path: Path) -> None:
    rows, reason = dry.dry_ranks(context(tmp_path), Definition(config=twin.config), ranks=16, ep=4, adapters=False)
    assert (reason, [row.rank for row in rows]) == ("", [0, 15])
    kinds = {(row.kind, row.ranks) for row in rows[0].collectives}
    assert ("all-to-all", 4) in kinds
    assert ("all-gather", 16) in kinds
    # rank by rank the model's weights in float32, uneven shards padded at most once each
    assert rows[0].weight_bytes * 16 >= 4 * int(twin.sizes["parameters"])


@pytest.mark.sandbox
def test_an_impossible_layout_is_a_reason_not_a_failure(twin: Any, tmp_path: Path) -> None:
    rows, reason = dry.dry_ranks(context(tmp_path), Definition(config=twin.config), ranks=16, ep=16, adapters=False)
    assert rows == []
    assert "2 of 2 ranks" in reason
    assert "does not divide" in reason


def test_losses_over_processes_are_those_of_one(twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "WORLDS", (1, 2))
    monkeypatch.setattr(gloo, "STEPS", 2)
    runs, reason = gloo.gloo_runs(context(tmp_path), Definition(config=twin.config), twin.to_json())
    assert (reason, [(r.ranks, r.ep) for r in runs]) == ("", [(1, 1), (2, 2)])
    assert runs[0].difference == 0
    assert runs[1].difference < 1e-5
    assert len(set(runs[0].losses)) == 3, "it trains"


def test_own_code_runs_over_no_network(tmp_path: Path) -> None:
    runs, reason = gloo.gloo_runs(context(tmp_path), Definition(config={}, code=tmp_path), "{}")
    assert runs == []
    assert "sandbox" in reason


def test_the_quick_profile_says_what_it_leaves_out(tmp_path: Path) -> None:
    definition = {"name": "d.tar", "digest": "0" * 64, "size": 1, "media_type": "application/x-tar"}
    intake = {
        "name": "m", "model_type": "kimi_linear", "source": "config", "digest": "0", "definition": definition,
        "config": {"model_type": "kimi_linear"}, "files": [], "has_code": False, "has_tokenizer": False,
    }  # fmt: skip
    parse = {"architecture": architecture().model_dump(), "seconds": 0.0}
    result = run(context(tmp_path, intake=intake, parse=parse, align=align_result().model_dump()))
    assert result.hardware.devices == 128
    assert (result.dry, result.gloo) == ([], [])
    assert "quick profile" in result.dry_reason
    assert "quick profile" in result.gloo_reason
    assert [mode.mode for mode in result.modes] == ["adapters", "full"]
    assert all(mode.projection for mode in result.modes)
    assert any("128 devices" in sentence for sentence in result.not_measured)
