"""The generate stage: an operator of the gap analysis in, a candidate artifact out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_templates.loading import load_source
from kernel_templates.registry import spec_class
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.problem import Problem
from onboarding.settings import Settings
from onboarding.stages.gaps.result import GapsResult, OperatorRow
from onboarding.stages.generate.stage import run

SPEC = spec_class("gated_activation")(width=9216, layout="concatenated")


def _context(tmp_path: Path, key: str) -> StageContext:
    row = OperatorRow(
        digest=SPEC.digest(), name="SwiGLU", role="mlp", family=SPEC.family, calls=27, flops=1.0, bytes_moved=1.0,
        floor_ms=1.0, provider="transformers eager", provider_ms=2.0, basis="assumed", share_flops=0.1,
        share_bytes=0.1, share_time=0.1, gap=True, spec=SPEC.to_dict(),
    )  # fmt: skip
    gaps = GapsResult(target="nvidia_h200", sequence_length=8192, rows=[row], gaps=[row.digest], step_ms=2.0)
    return StageContext(
        job_id="job",
        job_name="toy",
        stage="generate",
        key=key,
        attempt=1,
        options=JobOptions(),
        profile=PROFILES["quick"],
        settings=Settings(home=tmp_path),
        scratch=tmp_path,
        artifacts=ArtifactStore(tmp_path.as_uri()),
        policy=RulePolicy(),
        emit=lambda kind, **data: None,
        load_result=lambda stage, key: gaps.model_dump() if stage == "gaps" else None,
    )


def test_a_candidate_is_stored(tmp_path):
    context = _context(tmp_path, SPEC.digest())
    result = run(context)
    source = context.artifacts.get(result.candidate.digest).decode()
    module = load_source(source, tmp_path)
    assert module.SPEC == result.spec == SPEC.to_dict()
    assert result.kernels == ["_forward_kernel", "_backward_kernel"]
    assert result.lines == len(source.splitlines())
    assert source.startswith(f'"""{SPEC.words()}: forward and backward.')
    assert all(hasattr(module, name) for name in result.entry.values())
    # the same inputs, the same candidate
    assert run(context) == result


def test_an_operator_that_the_gaps_do_not_name_is_refused(tmp_path):
    with pytest.raises(Problem) as caught:
        run(_context(tmp_path, "0" * 16))
    assert caught.value.kind == "operator-unknown"
