"""The planner: from any history it goes on, never repeats finished work, never starts without inputs, and ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from onboarding.pipeline import FINAL_STEP_STATES
from onboarding.planner import NewStep, Plan, plan

GAPS = ("aa", "bb")
OPERATOR_STAGES = ("generate", "judge", "tune")


@dataclass
class Fake:
    """A step in memory."""

    stage: str
    key: str = ""
    attempt: int = 1
    state: str = "ready"
    input: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    problem: dict[str, Any] | None = None


def done(stage: str, key: str = "", attempt: int = 1, **result: Any) -> Fake:
    """A succeeded step."""
    return Fake(stage, key, attempt, "succeeded", result={"outcome": "ok", **result})


def up_to_gaps(*gaps: str) -> list[Fake]:
    return [done("intake"), done("parse"), done("gaps", gaps=list(gaps))]


def names(decision: Plan) -> list[tuple[str, str, int]]:
    return [(new.stage, new.key, new.attempt) for new in decision.new_steps]


def test_the_order_of_a_job_without_surprises() -> None:
    assert names(plan("queued", [], "auto")) == [("intake", "", 1)]
    assert names(plan("running", [done("intake")], "auto")) == [("parse", "", 1)]
    steps = up_to_gaps("aa", "bb")
    assert names(plan("running", steps, "auto")) == [("generate", "aa", 1), ("generate", "bb", 1)]


def test_each_operator_follows_its_own_path() -> None:
    steps = [*up_to_gaps("aa", "bb"), done("generate", "aa"), Fake("generate", "bb", state="running")]
    assert names(plan("running", steps, "auto")) == [("judge", "aa", 1)]


def test_without_gaps_alignment_follows_at_once() -> None:
    assert names(plan("running", up_to_gaps(), "auto")) == [("align", "", 1)]


def test_a_refused_operator_stays_with_torch_and_the_job_goes_on() -> None:
    steps = [*up_to_gaps("aa"), done("generate", "aa"), done("judge", "aa", outcome="refused", next_move="give_up")]
    assert names(plan("running", steps, "auto")) == [("align", "", 1)]


def test_a_refusal_leads_back_to_generate_at_most_three_times() -> None:
    steps = up_to_gaps("aa")
    for attempt in (1, 2, 3):
        steps += [done("generate", "aa", attempt)]
        steps += [done("judge", "aa", attempt, outcome="refused", next_move="repair")]
        assert names(plan("running", steps, "auto")) == [("generate", "aa", attempt + 1)]
    steps += [done("generate", "aa", 4)]
    assert names(plan("running", steps, "auto")) == [("judge", "aa", 4)]
    steps += [done("judge", "aa", 4, outcome="refused", next_move="repair")]
    assert names(plan("running", steps, "auto")) == [("align", "", 1)]


def test_misalignment_drops_culprits_and_adds_them_up() -> None:
    steps = [*up_to_gaps(), done("align", outcome="misaligned", culprits=["aa"])]
    decision = plan("running", steps, "auto")
    assert decision.new_steps == (NewStep(stage="align", key="", attempt=2, queue="cpu", input={"dropped": ["aa"]}),)
    again = done("align", "", 2, outcome="misaligned", culprits=["bb", "aa"])
    again.input = {"dropped": ["aa"]}
    assert plan("running", [*steps, again], "auto").new_steps[0].input == {"dropped": ["aa", "bb"]}


def test_misalignment_without_a_new_culprit_fails_the_job() -> None:
    again = done("align", outcome="misaligned", culprits=["aa"], summary="curve outside")
    again.input = {"dropped": ["aa"]}
    decision = plan("running", [*up_to_gaps(), again], "auto")
    assert decision.job_outcome == "failed"
    assert decision.problem is not None
    assert (decision.problem["stage"], decision.problem["detail"]) == ("align", "curve outside")


def test_a_failure_drops_what_waits_and_keeps_its_problem() -> None:
    broken = Fake("generate", "aa", state="failed", problem={"title": "no"})
    steps = [*up_to_gaps("aa", "bb"), broken, Fake("generate", "bb", state="running")]
    assert plan("running", steps, "auto") == Plan(drop_ready=True)
    steps[-1].state = "succeeded"
    decision = plan("running", steps, "auto")
    assert decision.job_outcome == "failed"
    assert decision.problem == {"title": "no", "stage": "generate", "key": "aa", "attempt": 1}


def test_a_required_stage_must_not_be_skipped() -> None:
    skipped = Fake("intake", state="skipped", result={"outcome": "skipped", "summary": "nothing here"})
    decision = plan("running", [skipped], "auto")
    assert decision.job_outcome == "failed"
    assert decision.problem is not None
    assert decision.problem["detail"] == "nothing here"


def test_gpu_stages_go_to_the_gpu_queue_when_the_job_says_cuda() -> None:
    steps = [*up_to_gaps("aa"), done("generate", "aa")]
    assert plan("running", steps, "cuda").new_steps[0].queue == "gpu"
    assert plan("running", steps, "auto").new_steps[0].queue == "cpu"


def test_cancelling_waits_for_running_steps() -> None:
    steps = [done("intake"), Fake("parse", state="running")]
    assert plan("running", steps, "auto", cancelling=True) == Plan(drop_ready=True)
    steps[-1].state = "cancelled"
    assert plan("running", steps, "auto", cancelling=True).job_outcome == "cancelled"


OUTCOMES: dict[str, list[dict[str, Any]]] = {
    "gaps": [{"gaps": []}, {"gaps": ["aa"]}, {"gaps": list(GAPS)}],
    "generate": [{}, {"outcome": "gave_up"}],
    "judge": [
        {"outcome": "accepted"},
        {"outcome": "refused", "next_move": "give_up"},
        {"outcome": "refused", "next_move": "repair"},
    ],
    "align": [{}, {"outcome": "misaligned", "culprits": ["aa"]}, {"outcome": "misaligned", "culprits": ["bb"]}],
}


def path_ended(steps: list[Fake], key: str) -> bool:
    """Whether nothing more can happen for an operator, told from its newest steps alone."""
    newest = {s.stage: (i, s) for i, s in enumerate(steps) if s.key == key and s.stage in OPERATOR_STAGES}
    if not newest:
        return False
    _, last = max(newest.values(), key=lambda item: item[0])
    if last.state not in ("succeeded", "skipped"):
        return False
    outcome = (last.result or {}).get("outcome", "ok")
    return last.stage == "tune" or last.state == "skipped" or outcome in ("refused", "gave_up")


def check_inputs(steps: list[Fake], new: NewStep) -> None:
    """What a new step builds on is there and is the newest."""
    newest = {(s.stage, s.key): s for s in steps}
    before = {"parse": "intake", "gaps": "parse", "throughput": "align", "scale": "throughput", "package": "scale"}
    if new.stage in before:
        assert newest[before[new.stage], ""].state in ("succeeded", "skipped")
    elif new.stage == "generate":
        assert new.key in (newest["gaps", ""].result or {})["gaps"]
    elif new.stage in ("judge", "tune"):
        source = newest["generate" if new.stage == "judge" else "judge", new.key]
        assert source.state == "succeeded"
        assert (source.result or {}).get("outcome") not in ("refused", "gave_up")
    elif new.stage == "align":
        assert all(path_ended(steps, key) for key in (newest["gaps", ""].result or {})["gaps"])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_history_ends_without_repeating_finished_steps(data: st.DataObject) -> None:
    steps: list[Fake] = []
    retries = data.draw(st.integers(0, 3), "retries")
    cancelling = False
    for _ in range(400):
        decision = plan("running", steps, "auto", cancelling=cancelling)
        for new in decision.new_steps:
            check_inputs(steps, new)
            same = [s for s in steps if (s.stage, s.key) == (new.stage, new.key)]
            assert new.attempt == len(same) + 1
            assert all(s.state in FINAL_STEP_STATES for s in same), "two attempts of one step at a time"
            steps.append(Fake(new.stage, new.key, new.attempt, input=new.input))
        if decision.drop_ready:
            for step in steps:
                step.state = "cancelled" if step.state == "ready" else step.state
        if decision.job_outcome is not None:
            assert not any(s.state in ("ready", "running") for s in steps)
            if decision.job_outcome == "succeeded":
                assert steps[-1].stage == "package"
                return
            again = [s for s in {(s.stage, s.key): s for s in steps}.values() if s.state in ("failed", "cancelled")]
            if retries == 0 or not again:
                return
            retries, cancelling = retries - 1, False
            steps += [Fake(s.stage, s.key, s.attempt + 1, input=s.input) for s in again]
            continue
        active = [s for s in steps if s.state in ("ready", "running")]
        assert active, "neither an outcome nor anything to wait for"
        step = data.draw(st.sampled_from(active), "step")
        if step.state == "ready":
            step.state = "running"
            continue
        cancelling = cancelling or data.draw(st.integers(0, 30), "cancel") == 30
        if cancelling:
            step.state = "cancelled"
            continue
        step.state = data.draw(st.sampled_from(["succeeded"] * 8 + ["skipped", "failed"]), "state")
        if step.state == "succeeded":
            step.result = {"outcome": "ok", **data.draw(st.sampled_from(OUTCOMES.get(step.stage, [{}])), "result")}
        elif step.state == "failed":
            step.problem = {"title": "failed"}
    raise AssertionError("the job does not end")
