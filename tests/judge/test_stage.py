"""The judge stage: a fault of its own costs one operator, a fault of the machine is raised."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_templates.norm.spec import Spec
from onboarding.problem import Problem, StageSkipped
from onboarding.stages.judge import stage


def context(folder: Path) -> Any:
    generated = SimpleNamespace(candidate=SimpleNamespace(digest="d"), spec=Spec(hidden=8).to_dict())
    return SimpleNamespace(
        key="k",
        scratch=folder,
        options=SimpleNamespace(device="cpu"),
        profile=SimpleNamespace(judge_cases=2),
        settings=SimpleNamespace(resolved_home=folder, unsafe_no_sandbox=False),
        artifacts=SimpleNamespace(get=lambda digest: b"x = 1\n"),
        result=lambda *_: generated,
        progress=lambda *_: None,
    )


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (RuntimeError("cannot reshape tensor of 0 elements"), StageSkipped),
        (KeyError("rope"), StageSkipped),
        (OSError("No space left on device"), OSError),
        (MemoryError(), MemoryError),
        (Problem("no-sandbox", "no sandbox works here"), Problem),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_only_faults_of_the_judge_are_the_operators_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, raised: type[Exception]
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise fault

    monkeypatch.setattr(stage, "judge", failing)
    with pytest.raises(raised) as caught:
        stage.run(context(tmp_path))
    if raised is StageSkipped:
        assert type(fault).__name__ in str(caught.value)
        assert "torch keeps serving it" in str(caught.value)
