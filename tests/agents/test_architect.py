"""The architect: what becomes of novel modules, by rules and by a model; kills, injected text, what is shown."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import novel_module as novel
import pytest
from injections import CORPUS
from llm_server import LlmServer, Said, message
from searching import Scripted, settings

from agents import architect
from agents.choose import policy_for
from agents.llm.caller import Who
from agents.llm.prompt import messages
from agents.roles import architect as role
from kernel_templates.registry import load_spec
from onboarding.novel import facts
from onboarding.novel.facts import Proof
from onboarding.pipeline import JobOptions
from onboarding.policy import RulePolicy
from onboarding.settings import LlmSettings, Settings
from onboarding.stages.gaps.result import GapsResult
from onboarding.store import Store


def fakes(proofs: list[Proof], calls: Path) -> None:
    """Stand in for what runs in the sandbox: looking at the module, and proving."""

    def proved(*args: Any, **kwargs: Any) -> Proof:
        with calls.open("a") as file:
            file.write("p")
        return proofs[min(len(calls.read_text()), len(proofs)) - 1]

    parts: Any = architect
    parts.analyse = lambda context: novel.GAPS
    parts.definition_of = lambda context: None
    parts.derive_twin = lambda *args, **kwargs: novel.PLAN
    parts.survey = lambda *args, **kwargs: [novel.module()]
    parts.prove = proved


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("analyse", "definition_of", "derive_twin", "survey", "prove"):
        monkeypatch.setattr(architect, name, getattr(architect, name))


def llm(home: Path, url: str = "", send: Any = None, **more: Any) -> Any:
    told = LlmSettings(base_url=url, model="scripted", answers="schema", **more) if url else settings(home, **more).llm
    where = Settings(home=home, llm=told)
    store = Store(where.resolved_database_url())
    store.migrate()
    known = store.list_jobs("o", name="n").jobs
    job = (
        known[0]
        if known
        else store.create_job(name="n", model_type="m", owner="o", definition="d", options=JobOptions(policy="llm"))
    )
    who = Who(job_id=job.id, project="default", stage="gaps", key="", attempt=1)
    return policy_for(where, store, who, JobOptions(policy="llm"), None, send), store, job.id


PROVEN = Proof(proven=True, error=1e-15, checks=9)
REFUTED = Proof(proven=False, error=0.4, checks=3, reasons=["grad k is off by 0.4 of its size"])


def run(home: Path, policy: Any) -> GapsResult:
    return architect.run_step(novel.context(home, "gaps", policy, novel.parsed("QuadraAttention")))


def test_rules_end_honest(tmp_path: Path) -> None:
    fakes([PROVEN], tmp_path / "calls")
    parts: Any = architect
    parts.survey = lambda *a, **k: pytest.fail("nothing is looked at for a policy that proposes nothing")
    result = run(tmp_path, RulePolicy())
    (named,) = result.novel
    assert named.outcome == "own code"
    assert named.words.startswith("novel, served by its own torch code")
    assert "QuadraAttention: novel, served by its own torch code" in result.summary
    assert (result.gaps, result.uses) == ([], [])


def test_a_model_without_novel_modules_is_asked_nothing(tmp_path: Path) -> None:
    fakes([PROVEN], tmp_path / "calls")
    context = novel.context(tmp_path, "gaps", RulePolicy(), novel.parsed())
    assert architect.run_step(context) == novel.GAPS


def test_what_is_proven_becomes_a_gap_with_a_place(tmp_path: Path) -> None:
    fakes([PROVEN], tmp_path / "calls")
    sender = Scripted(lambda schema, prompt, n: novel.answer())
    policy, store, job = llm(tmp_path, send=sender)
    result = run(tmp_path, policy)
    (use,) = result.uses
    (row,) = result.rows
    assert result.gaps == [use.digest] == [row.digest]
    spec = load_spec(use.spec)
    assert spec.family == "novel"
    assert {n: d.full for n, d in spec.call.dims.items()} == {"B": 1, "H": 32, "T": 2048, "D": 64}  # type: ignore[attr-defined]
    assert {i.name: i.values.spread for i in spec.call.inputs} == {"q": 0.9, "k": 0.9, "v": 0.9}  # type: ignore[attr-defined]
    (binding,) = use.bindings
    assert (binding.hook, binding.function) == ("novel", "rectified_attention")
    assert binding.attributes["constant scaling"] == "D ** -0.5"
    # three passes over 688 operators at 5 us a launch: eager cannot be faster
    assert row.provider_ms >= 3 * 688 * 5e-3
    assert result.step_ms == novel.GAPS.step_ms, "its operators stand in other rows already"
    assert [e.role for e in store.ledger(job)] == ["architect"]
    assert "D ** -0.5" in role.guide()


def test_a_refuted_claim_is_told_and_made_again(tmp_path: Path) -> None:
    fakes([REFUTED, PROVEN], tmp_path / "calls")
    sender = Scripted(lambda schema, prompt, n: novel.answer(name=f"claim {n}"))
    result = run(tmp_path, llm(tmp_path, send=sender)[0])
    assert (result.novel[0].outcome, result.novel[0].tries) == ("operator", 2)
    assert "grad k is off by 0.4 of its size" in sender.bodies[1]["messages"][1]["content"]


def test_claims_that_are_never_proven_leave_the_module_alone(tmp_path: Path) -> None:
    fakes([REFUTED], tmp_path / "calls")
    sender = Scripted(lambda schema, prompt, n: novel.answer(name=f"claim {n}"))
    result = run(tmp_path, llm(tmp_path, send=sender)[0])
    assert len(sender.bodies) == architect.TRIES
    assert result.gaps == []
    assert "no proposal was proven" in result.novel[0].words


WRONG = {
    "unknown core": {"function": "os.system"},
    "core with an obstacle": {"function": ""},
    "tensor left out": {"inputs": novel.answer()["inputs"][:2]},
    "constant left out": {"constants": []},
    "shape that cannot be": {"inputs": [{**i, "shape": ["B", "B", "T", "D"]} for i in novel.answer()["inputs"]]},
    "name that is none": {"inputs": [{**i, "name": i["name"] + "; import os"} for i in novel.answer()["inputs"]]},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_claim_that_does_not_fit_what_was_seen_is_never_run(case: str, tmp_path: Path) -> None:
    fakes([PROVEN], tmp_path / "calls")
    sender = Scripted(lambda schema, prompt, n: novel.answer(**WRONG[case]))
    result = run(tmp_path, llm(tmp_path, send=sender)[0])
    assert result.uses == []
    assert not (tmp_path / "calls").exists()


def test_a_spent_budget_ends_the_asking_and_not_the_job(tmp_path: Path) -> None:
    fakes([PROVEN], tmp_path / "calls")
    policy, _, _ = llm(tmp_path, send=Scripted(lambda schema, prompt, n: novel.answer()), job_tokens=10)
    result = run(tmp_path, policy)
    assert "budget" in result.novel[0].words


@pytest.mark.parametrize("name", CORPUS)
def test_injected_code_changes_nothing_but_the_text(name: str) -> None:
    def asked(source: str) -> tuple[str, str]:
        question = role.question(novel.module(source), [], 0)
        system, user = messages(question.system, question.task, question.data, 60_000)
        return system["content"], user["content"]

    honest, evil = asked("class QuadraAttention: ..."), asked(CORPUS[name])
    assert honest[0] == evil[0]
    outside = [text.split("</data")[-1].partition("\n")[2] for text in (honest[1], evil[1])]
    assert outside[0] == outside[1]


def test_constants_follow_the_dims_and_nothing_else() -> None:
    assert facts.constant_of("D ** -0.5", {"D": 16}) == 0.25
    assert facts.constant_of("2 * D", {"D": 16}) == 32.0
    assert facts.constant_of("0.125", {}) == 0.125
    assert facts.constant_of("None", {}) is None
    for bad in ("__import__('os')", "D ** E", "X", "", "1 / D"):
        with pytest.raises(ValueError, match=r"."):
            facts.constant_of(bad, {"D": 16})


# ---- kill -9 at every node ---------------------------------------------------------------------------------------


def killed_after(home: Path, url: str, node: str) -> None:
    """Run the step and die once a node is done, before its result is written."""
    fakes([REFUTED, PROVEN], home / "calls")
    own = getattr(architect._Nodes, node)

    def dying(self: Any, state: Any) -> Any:
        found = own(self, state)
        if not (home / f"died-{node}").exists():
            (home / f"died-{node}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(architect._Nodes, node, dying)
    run(home, llm(home, url)[0])


@pytest.mark.parametrize("node", ["survey", "propose", "prove", "finish"])
def test_kill_9_at_any_node_resumes_there_and_pays_nothing_twice(node: str, tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> Said:
        return message(json.dumps(novel.answer(name=f"claim {number}")))

    with LlmServer(script) as server:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=killed_after, args=(tmp_path, server.url, node))
        process.start()
        process.join(200)
        assert process.exitcode == -signal.SIGKILL
        fakes([REFUTED, PROVEN], tmp_path / "calls")
        if node == "prove":  # the proof of the first claim ran before the kill, and runs again
            (tmp_path / "calls").unlink()
        result = run(tmp_path, llm(tmp_path, server.url)[0])
    assert result.novel[0].outcome == "operator"
    assert len(server.requests) == 2, f"{len(server.requests)} calls for two answers"
