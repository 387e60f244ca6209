"""Diagnosis: what the facts allow, what the policies choose of it, and where the pipeline takes it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import novel_module as novel
import pytest
from injections import CORPUS
from searching import Scripted
from test_architect import llm
from test_kernel_search import candidate, verdict

from agents import diagnose, kernel_search
from agents.llm.prompt import messages
from agents.roles import analyst, diagnoser
from onboarding.planner import plan
from onboarding.policy import Diagnosis, Finding, RulePolicy, Suspect, Tuned
from onboarding.stages.align.result import AlignResult, Curves, LayerError
from onboarding.stages.throughput.result import LayerTime, ThroughputResult, Training
from onboarding.stages.tune.result import TuneResult

GUILTY = "a" * 16


def aligned(outcome: str = "misaligned", culprits: tuple[str, ...] = (GUILTY,), **more: Any) -> AlignResult:
    row = {"layer": 1, "block": "X", "p50": 0.1, "p99": 0.2, "maximum": 0.3, "tolerance": 0.01}
    layers = [
        LayerError(name="model.layers.1", kind="output", rms=0.02, share=2.0, **row),
        LayerError(name="model.layers.1.attn.q_proj.weight", kind="gradient", rms=0.5, share=50.0, **row),
    ]
    curves = Curves(steps=[1], reference=[5.0], candidate=[5.0], band=[0.1], band_basis="b")
    return AlignResult(
        outcome=outcome, summary="misaligned: gradient at 50 of tolerance", twin={}, device="cpu", dtype="float32",
        layers=layers, curves=curves, worst_share=50.0, worst_where="gradient", inside_band=True, p_value=0.5,
        swapped={GUILTY: 2}, culprits=list(culprits), corpus="c", seconds=1.0, **more,
    )  # fmt: skip


def upstream(stage: str, key: str) -> Any:
    if stage == "generate":
        return SimpleNamespace(words="novel: rectified attention")
    return verdict("accepted").model_dump() if stage == "judge" else None


def run(home: Path, monkeypatch: pytest.MonkeyPatch, result: Any, policy: Any = None, attempt: int = 1) -> Any:
    stage = "align" if isinstance(result, AlignResult) else "throughput"
    monkeypatch.setitem(sys.modules, f"onboarding.stages.{stage}.stage", SimpleNamespace(run=lambda context: result))
    return diagnose.run_step(novel.context(home, stage, policy, upstream, attempt))


def chosen(**changes: Any) -> dict[str, Any]:
    said = {"cause": "kernels", "remedy": "repair", "digests": [GUILTY], "explanation": "its gradient of q is off"}
    return {**said, **changes}


def test_rules_drop_what_bisection_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, aligned())
    assert (result.remedy, result.culprits, result.diagnosis.by) == ("drop", [GUILTY], "rules")
    assert "50" in result.diagnosis.words, "the worst evidence is named"


def test_what_is_aligned_is_not_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, aligned("ok", ()))
    assert result.diagnosis is None


def test_a_model_may_have_a_kernel_written_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = llm(tmp_path, send=Scripted(lambda schema, prompt, n: chosen()))[0]
    first = run(tmp_path, monkeypatch, aligned(), policy)
    assert (first.remedy, first.diagnosis.by) == ("repair", "llm")
    assert first.why[0] == "its gradient of q is off"
    again = run(tmp_path, monkeypatch, aligned(), policy, attempt=2)
    assert again.remedy == "drop", "a second deviation is answered by torch"


@pytest.mark.parametrize(
    "answer",
    [
        chosen(remedy="ship it"),
        chosen(cause="the judge is wrong"),
        chosen(digests=["b" * 16]),
        chosen(remedy="repair", digests=[]),
        chosen(remedy="report"),
    ],
)
def test_an_answer_outside_the_facts_is_the_rules_choice(
    answer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = llm(tmp_path, send=Scripted(lambda schema, prompt, n: answer))[0]
    result = run(tmp_path, monkeypatch, aligned(), policy)
    assert (result.remedy, result.culprits, result.diagnosis.by) == ("drop", [GUILTY], "rules")


def step(stage: str, attempt: int, result: dict[str, Any] | None, key: str = "", **more: Any) -> Any:
    facts = {"state": "succeeded", "input": {}, "problem": None, "result": result or {"outcome": "ok"}}
    return SimpleNamespace(stage=stage, key=key, attempt=attempt, **{**facts, **more})


def test_a_repair_goes_back_to_the_guilty_operator_and_then_forward_again() -> None:
    other = "b" * 16
    steps = [
        step("intake", 1, None),
        step("parse", 1, None),
        step("gaps", 1, {"outcome": "ok", "gaps": [GUILTY, other]}),
    ]
    for key in (GUILTY, other):
        steps += [
            step("generate", 1, None, key),
            step("judge", 1, {"outcome": "accepted"}, key),
            step("tune", 1, None, key),
        ]
    steps.append(
        step("align", 1, {"outcome": "misaligned", "remedy": "repair", "culprits": [GUILTY], "why": ["q is off"]})
    )
    (new,) = plan("running", steps, "cpu").new_steps
    assert (new.stage, new.key, new.attempt, new.input) == ("generate", GUILTY, 2, {"misaligned": ["q is off"]})
    steps.append(step("generate", 2, None, GUILTY))
    (new,) = plan("running", steps, "cpu").new_steps
    assert (new.stage, new.key, new.attempt) == ("judge", GUILTY, 2)
    steps += [step("judge", 2, {"outcome": "accepted"}, GUILTY), step("tune", 2, None, GUILTY)]
    (new,) = plan("running", steps, "cpu").new_steps
    assert (new.stage, new.attempt) == ("align", 2)
    dropping = {"outcome": "misaligned", "remedy": "drop", "culprits": [GUILTY]}
    (new,) = plan("running", [*steps, step("align", 2, dropping)], "cpu").new_steps
    assert (new.stage, new.attempt, new.input) == ("align", 3, {"dropped": [GUILTY]})


def test_the_search_takes_a_deviation_for_a_refusal() -> None:
    tries = [
        {"number": 1, "rung": 5, "refused": True, "reasons": ["first"]},
        {"number": 2, "rung": 5, "refused": False, "reasons": []},
    ]
    first, second = kernel_search._misaligned(tries, ["grad q is off"])
    assert first["reasons"] == ["first"]
    assert second["refused"]
    assert second["reasons"] == ["accepted by the judge, but in the model: grad q is off"]


def trained(speedup: float | None, outside: float = 0.1) -> ThroughputResult:
    once = {"tokens_per_second": 1.0, "step_ms": 10.0, "fastest_ms": 9.0, "slowest_ms": 11.0, "steps": 3, "tflops": 1.0}
    runs = [Training(name="with the bundle", peak_bytes=1, first_loss=5.0, last_loss=4.0, **once)]
    breakdown = [
        LayerTime(kind="X: attention", block=0, forward_ms=3.0, backward_ms=6.0, share=1 - outside),
        LayerTime(kind="head and loss", forward_ms=0.5, backward_ms=0.5, share=outside),
    ]
    return ThroughputResult(
        summary="s", trained="twin", words="w", sizes={}, device="cpu", dtype="float32", adapters=False, batch=1,
        sequence_length=64, flops_per_token=1.0, runs=runs, speedup=speedup, breakdown=breakdown,
        breakdown_of="with the bundle", not_measured=[], corpus="c", seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speedup", "outside", "cause"),
    [(0.5, 0.1, "slower kernels"), (1.4, 0.6, "host"), (None, 0.1, "own code"), (0.99, 0.1, "own code")],
)
def test_a_bottleneck_is_named(
    speedup: float | None, outside: float, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path, monkeypatch, trained(speedup, outside))
    assert (result.diagnosis.cause, result.remedy, result.outcome) == (cause, "report", "ok")


@pytest.mark.parametrize("name", CORPUS)
def test_injected_words_choose_no_remedy(name: str) -> None:
    finding = Finding(
        stage="align", summary="s", evidence=[CORPUS[name]], causes=["kernels"], remedies=["drop"],
        suspects=[Suspect(digest=GUILTY, words=CORPUS[name], evidence="e")],
    )  # fmt: skip
    question = diagnoser.question(finding)
    system, user = messages(question.system, question.task, question.data, 60_000)
    assert system["content"].startswith(diagnoser.SYSTEM)
    assert user["content"].endswith(question.task)
    gullible = diagnoser.Diagnosed(cause="kernels", remedy="ship", digests=[], explanation=CORPUS[name])
    assert diagnoser.within(gullible, finding) == RulePolicy().diagnose(finding)


def measured_in(home: Path) -> Any:
    """A stage that notes each of its runs."""

    def run(context: Any) -> AlignResult:
        with (home / "calls").open("a") as file:
            file.write("m")
        return aligned()

    return SimpleNamespace(run=run)


def killed_after(home: Path, node: str) -> None:
    sys.modules["onboarding.stages.align.stage"] = measured_in(home)
    own = getattr(diagnose._Nodes, node)

    def dying(self: Any, state: Any) -> Any:
        own(self, state)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(diagnose._Nodes, node, dying)
    diagnose.run_step(novel.context(home, "align", None, upstream))


@pytest.mark.parametrize("node", ["measure", "gather", "diagnose", "act"])
def test_kill_9_at_any_node_resumes_there_and_measures_once(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=killed_after, args=(tmp_path, node))
    process.start()
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
    monkeypatch.setitem(sys.modules, "onboarding.stages.align.stage", measured_in(tmp_path))
    result = diagnose.run_step(novel.context(tmp_path, "align", None, upstream))
    assert isinstance(result, AlignResult)
    assert result.remedy == "drop"
    # killed inside its own node the measurement is not stored yet
    assert (tmp_path / "calls").read_text() == ("mm" if node == "measure" else "m")


# ---- the analyst -------------------------------------------------------------------------------------------------


def tuned(digest: str, share: float, ms: float, floor: float) -> Tuned:
    return Tuned(
        digest=digest, words="w", source="# kernel", share_of_step=share, milliseconds=ms, floor_ms=floor, rows=[]
    )


def test_the_analyst_takes_what_gains_most_on_the_whole_step(tmp_path: Path) -> None:
    said = {"bottleneck": "bytes", "change": "keep the tile in registers", "expected_ms": 1.0}
    sender = Scripted(lambda schema, prompt, n: said)
    policy = llm(tmp_path, send=sender)[0]
    found = policy.analyse([tuned("small", 0.05, 4.0, 0.5), tuned("large", 0.4, 2.0, 0.5)], 0)
    assert found is not None
    # 0.4 of the step halved is more than 0.05 of it quartered
    assert found[0] == "large"
    assert found[1].expected_ms == 1.0
    assert len(sender.bodies) == 2


def test_the_analyst_is_not_asked_at_the_floor_and_cannot_go_below_it(tmp_path: Path) -> None:
    sender = Scripted(lambda schema, prompt, n: {"bottleneck": "b", "change": "c", "expected_ms": 0.0})
    policy = llm(tmp_path, send=sender)[0]
    assert policy.analyse([tuned("near", 0.5, 1.1, 1.0), tuned("tiny", 0.005, 9.0, 1.0)], 0) is None
    assert sender.bodies == []
    found = policy.analyse([tuned("far", 0.5, 4.0, 1.0)], 0)
    assert found is not None
    assert found[1].expected_ms == 1.0
    assert analyst.worth(tuned("far", 0.5, 4.0, 1.0), -3.0) == 0.5 * 0.75


def test_rules_analyse_nothing() -> None:
    assert RulePolicy().analyse([tuned("far", 0.5, 4.0, 1.0)], 0) is None
    assert Diagnosis(cause="none", remedy="report", words="w", by="rules").digests == []


def test_what_the_analyst_says_of_a_tuned_kernel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"bucket": "{}", "config": {"BM": 64}, "forward_ms": 1.0, "backward_ms": 3.0, "tried": 2}
    result = TuneResult(summary="s", device="nvidia_h200", rows=[row], seconds=1.0)
    monkeypatch.setitem(sys.modules, "onboarding.stages.tune.stage", SimpleNamespace(run=lambda context: result))
    said = {"bottleneck": "bytes", "change": "keep the tile in registers", "expected_ms": 1.0}
    sender = Scripted(lambda schema, prompt, n: said)
    policy, store, _ = llm(tmp_path, send=sender)
    base = novel.context(tmp_path, "tune", policy)
    generated = candidate(base).model_dump(mode="json")
    gap = {"digest": GUILTY, "spec": {"family": "novel"}, "share_time": 0.4, "floor_ms": 8.0, "calls": 16}
    upstream = {"gaps": {"rows": [gap]}, "generate": generated}
    context = dataclasses.replace(base, key=GUILTY, load_result=lambda stage, key: upstream.get(stage))
    tuned_result = kernel_search.run_step(context)
    assert isinstance(tuned_result, TuneResult)
    assert tuned_result.next_change is not None
    assert tuned_result.next_change.expected_ms == 1.0
    (lesson,) = store.lessons("default", "novel", 9)
    # one call moves its bytes in 8 ms / 16
    assert "timed at 4 ms, floor 0.5; the analyst expects 1" in lesson
    assert len(sender.bodies) == 1
