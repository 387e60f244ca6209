"""The policy's budget and words: an operator's share, the reporter's checked numbers, what is charged to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from searching import Scripted, settings

from agents.choose import limits_of, policy_for, saving_share
from agents.llm.caller import Who
from agents.policy import LLMPolicy
from onboarding.pipeline import JobOptions
from onboarding.policy import RulePolicy, Spending
from onboarding.problem import Problem
from onboarding.settings import LlmSettings, Settings
from onboarding.store import Store
from workers.step_main import policy_of

GAPS = {"gaps": ["a", "b"], "rows": [{"digest": "a", "saving_ms": 9.0}, {"digest": "b", "saving_ms": 1.0}]}
FACTS = {"kernels": [{"worst": 0.6841, "cases": 12}], "total": 49_100_000_000}


def policy(tmp_path: Path, texts: list[str], key: str = "", **llm: Any) -> tuple[LLMPolicy, Store, Scripted]:
    store = Store(f"sqlite:///{tmp_path / 'onboard.db'}")
    store.migrate()
    job = store.create_job(name="m", model_type="t", owner="o", definition="d")
    sender = Scripted(lambda schema, prompt, n: {"text": texts[min(n, len(texts) - 1)]})
    who = Who(job_id=job.id, project="p", stage="package", key=key, attempt=1)
    made = policy_for(settings(tmp_path, **llm), store, who, JobOptions(policy="llm"), GAPS, sender)
    assert isinstance(made, LLMPolicy)
    return made, store, sender


def test_a_summary_with_an_invented_number_is_asked_for_again(tmp_path: Path) -> None:
    told, _, sender = policy(tmp_path, ["12 cases and 3.7 times faster", "12 cases, worst 0.68, 49.1 B parameters"])
    assert told.narrate(FACTS) == "12 cases, worst 0.68, 49.1 B parameters"
    assert "numbers that the record does not: 3.7" in sender.bodies[1]["messages"][1]["content"]
    assert [(c.role, c.calls, c.tokens) for c in told.costs()] == [("reporter", 2, 3000)]


def test_a_summary_that_keeps_inventing_is_dropped(tmp_path: Path) -> None:
    told, _, sender = policy(tmp_path, ["13 cases"])
    assert told.narrate(FACTS) == ""
    assert len(sender.bodies) == 2


def test_a_spent_budget_costs_the_summary_not_the_bundle(tmp_path: Path) -> None:
    told, _, sender = policy(tmp_path, ["12 cases"], job_tokens=10)
    assert told.narrate(FACTS) == ""
    assert sender.bodies == []


def test_an_operator_gets_its_share_of_the_budget(tmp_path: Path) -> None:
    assert saving_share(GAPS, "a") == pytest.approx(0.9)
    assert saving_share({"gaps": ["a", "b"], "rows": []}, "a") == 1.0
    shares = {key: policy(tmp_path / key, [""], key=key)[0].caller.limits.operator for key in ("a", "b")}
    assert [s.tokens if s else 0 for s in shares.values()] == [1_800_000, 200_000], "of two million"


def test_gpu_seconds_are_charged_once_and_limited(tmp_path: Path) -> None:
    told, store, _ = policy(tmp_path, [""], key="a", job_gpu_s=10.0)
    spending = Spending(role="judge", call="judge 1", gpu_s=6.0, wall_s=6.0, facts={})
    told.charge(spending)
    told.charge(spending)
    assert store.spent(job_id=told.caller.who.job_id).gpu_s == 6.0
    with pytest.raises(Problem, match="budget"):
        told.charge(Spending(role="judge", call="judge 2", gpu_s=6.0, wall_s=6.0, facts={}))


def test_a_job_narrows_the_services_limits_and_never_widens_them() -> None:
    service = Settings(llm=LlmSettings(job_tokens=1000, job_money=1.0))
    for options, tokens in ((JobOptions(max_tokens=10), 10), (JobOptions(max_tokens=10**9), 1000)):
        limit = limits_of(service, options).job
        assert limit is not None
        assert limit.tokens == tokens


def test_without_a_model_rules_decide_and_asking_for_one_is_a_problem(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'onboard.db'}")
    who = Who(job_id="j", project="p", stage="generate", key="", attempt=1)
    bare = Settings(home=tmp_path, llm=LlmSettings(base_url="", model=""))
    assert isinstance(policy_for(bare, store, who, JobOptions(), None), RulePolicy)
    with pytest.raises(Problem, match="none is configured"):
        policy_for(bare, store, who, JobOptions(policy="llm"), None)


def test_a_steps_process_takes_the_policy_that_the_job_wants(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'onboard.db'}")
    store.migrate()
    job = store.create_job(name="m", model_type="t", owner="o", definition="d")
    (step,) = store.steps(job.id)
    told = settings(tmp_path)
    for wanted, kind in (("auto", LLMPolicy), ("llm", LLMPolicy), ("rules", RulePolicy)):
        options = JobOptions.model_validate({"policy": wanted})
        assert type(policy_of(told, store, job, step, options)) is kind
    assert type(policy_of(Settings(home=tmp_path), store, job, step, JobOptions())) is RulePolicy
