"""The kernel search graph: explicit outcomes, refusal, and resumption after a kill between any two nodes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents import kernel_search
from onboarding.artifacts import ArtifactStore
from onboarding.context import StageContext
from onboarding.pipeline import PROFILES, JobOptions
from onboarding.policy import RulePolicy
from onboarding.problem import Problem, StageSkipped
from onboarding.settings import Settings
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult

SPEC = {"family": "norm", "hidden": 8}
KEY = "a" * 16


def context(home: Path, stage: str, attempt: int = 1) -> StageContext:
    return StageContext(
        job_id="job",
        job_name="name",
        stage=stage,
        key=KEY,
        attempt=attempt,
        options=JobOptions(),
        profile=PROFILES["quick"],
        settings=Settings(home=home),
        scratch=home / "scratch",
        artifacts=ArtifactStore((home / "artifacts").as_uri()),
        policy=RulePolicy(),
        emit=lambda kind, **data: None,
        load_result=lambda stage, key: {"rows": [{"digest": KEY, "spec": SPEC}]} if stage == "gaps" else None,
    )


def fake_stage(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[StageContext], Any]) -> None:
    monkeypatch.setitem(sys.modules, f"onboarding.stages.{name}.stage", SimpleNamespace(run=run))


def counted(calls: list[str], run: Callable[[StageContext], Any]) -> Callable[[StageContext], Any]:
    def counting(ctx: StageContext) -> Any:
        calls.append(ctx.stage)
        return run(ctx)

    return counting


def candidate(ctx: StageContext, source: str = "import math\n") -> GenerateResult:
    ref = ctx.artifacts.put(source.encode(), name="candidate.py", media_type="text/x-python")
    return GenerateResult(spec=SPEC, words="w", candidate=ref, template="t", lines=1, kernels=[], entry={})


def verdict(outcome: str) -> JudgeResult:
    return JudgeResult(
        outcome=outcome,
        spec=SPEC,
        candidate="c",
        level="interpreted",
        device="cpu",
        triton="3.6.0",
        torch="2.13.0",
        seed=1,
        cases=[],
        worst_share=0.5,
        worst_where="y",
        reasons=[] if outcome == "accepted" else ["zeros"],
        sandbox="none",
    )


def test_each_step_returns_its_own_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    fake_stage(monkeypatch, "generate", counted(calls, candidate))
    fake_stage(monkeypatch, "judge", counted(calls, lambda ctx: verdict("accepted")))
    generated = kernel_search.run_step(context(tmp_path, "generate"))
    judged = kernel_search.run_step(context(tmp_path, "judge"))
    assert isinstance(generated, GenerateResult)
    assert judged == verdict("accepted")
    assert calls == ["generate", "judge"]


def test_a_finished_step_is_answered_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    fake_stage(monkeypatch, "generate", counted(calls, candidate))
    first = kernel_search.run_step(context(tmp_path, "generate"))
    again = kernel_search.run_step(context(tmp_path, "generate"))
    assert first == again
    assert calls == ["generate"]


def test_a_refusal_ends_with_the_policys_move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_stage(monkeypatch, "judge", lambda c: verdict("refused"))
    result = kernel_search.run_step(context(tmp_path, "judge"))
    assert isinstance(result, JudgeResult)
    assert (result.outcome, result.next_move) == ("refused", "give_up")
    # The thread remembers the verdict: a second proposal would be byte for byte the first, so the rules give up.
    fake_stage(monkeypatch, "generate", candidate)
    with pytest.raises(StageSkipped, match="torch keeps serving"):
        kernel_search.run_step(context(tmp_path, "generate", attempt=2))


def test_a_skip_passes_through_and_can_be_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def skip(ctx: StageContext) -> None:
        raise StageSkipped("no GPU here")

    fake_stage(monkeypatch, "tune", skip)
    for _ in range(2):
        with pytest.raises(StageSkipped, match="no GPU here"):
            kernel_search.run_step(context(tmp_path, "tune"))


@pytest.mark.parametrize(
    ("source", "message"),
    [("import os\n", "imports os"), ("from ..x import y\n", r"imports \.\.x"), ("def f(:\n", "not valid Python")],
)
def test_cheap_checks_name_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, message: str) -> None:
    fake_stage(monkeypatch, "generate", lambda c: candidate(c, source))
    with pytest.raises(Problem, match=message) as caught:
        kernel_search.run_step(context(tmp_path, "generate"))
    assert "line 1" in caught.value.detail


def test_unknown_operator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="no operator spec"):
        kernel_search.run_step(dataclasses.replace(context(tmp_path, "judge"), key="b" * 16))


def _die(source: str) -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def _killed_in_check(home: Path) -> None:
    sys.modules["onboarding.stages.generate.stage"] = SimpleNamespace(run=_count_and_generate)  # type: ignore[assignment]
    kernel_search.template_findings = _die
    kernel_search.run_step(context(home, "generate"))


def _count_and_generate(ctx: StageContext) -> GenerateResult:
    with (ctx.settings.resolved_home / "calls").open("a") as file:
        file.write("x")
    return candidate(ctx)


def test_sigkill_after_a_node_does_not_repeat_its_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_killed_in_check, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    fake_stage(monkeypatch, "generate", _count_and_generate)
    result = kernel_search.run_step(context(tmp_path, "generate"))
    assert isinstance(result, GenerateResult)
    assert (tmp_path / "calls").read_text() == "x", "the generate node ran once, before the kill"
