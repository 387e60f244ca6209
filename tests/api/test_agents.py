"""The agents of a job through the API and the dashboard: ledger and story, approvals, candidates edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

from fastapi.testclient import TestClient

from api.dashboard.render import environment
from api.deps import Services
from onboarding.artifacts import ArtifactStore
from onboarding.novel.facts import Named, own_code
from onboarding.policy import Diagnosis
from onboarding.store import BudgetLimits, Call, Purse
from tests.api.story import DIGESTS, HOSTILE, Story

KEY = next(iter(DIGESTS.values()))


def told(story: Story, artifacts: ArtifactStore) -> None:
    """An author's call, its check that fails, a repair and the judge's verdict."""
    sources = [artifacts.put(text.encode(), name="t.py", media_type="text/x-python") for text in ("a = 1\n", "a = 2\n")]

    def call(role: str, name: str) -> Call:
        most = Purse(tokens=5000, money=1.0)
        request = {"messages": [{"role": "user", "content": f"please write {HOSTILE}"}], "mode": "schema"}
        return Call(
            job_id=story.id, project="p", stage="generate", key=KEY, attempt=1, role=role, call=name, model="m",
            most=most, request=request,
        )  # fmt: skip

    for number, (role, said) in enumerate((("author", {"plan": HOSTILE, "source": "a = 1"}), ("repairer", "prose"))):
        entry = story.store.reserve(call(role, f"call {number}"), BudgetLimits()).entry
        assert entry is not None
        assert entry.id is not None
        message = {"role": "assistant", "content": said if isinstance(said, str) else json.dumps(said)}
        story.store.settle(
            entry.id, {"message": message}, tokens_in=1000, tokens_cached=0, tokens_out=200, money=0.25, wall_s=2.0
        )
        facts = {
            "number": number + 1,
            "origin": role,
            "parent": number or None,
            "candidate": sources[number].digest,
            "reasons": [] if number else [f"line 1: {HOSTILE}"],
        }
        story.store.charge(call("check", f"check {number}"), gpu_s=0.0, wall_s=1.0, facts=facts)
    story.store.charge(call("judge", "judge"), gpu_s=3.0, wall_s=3.0, facts={"outcome": "accepted", "summary": "yes"})


def test_the_ledger_and_its_story(client: TestClient, story: Callable[..., Story], services: Services) -> None:
    job = story()
    told(job, services.artifacts)
    job.tell()
    body = client.get(f"/v1/jobs/{job.id}/agent").json()
    assert body["total"] == {"calls": 2, "tokens": 2400, "money": 0.5, "gpu_s": 3.0, "wall_s": 9.0}
    assert body["by_role"]["author"]["tokens"] == 1200
    assert [e["role"] for e in body["entries"]] == ["author", "check", "repairer", "check", "judge"]
    assert "request" not in body["entries"][0]
    entry = client.get(f"/v1/jobs/{job.id}/agent/{body['entries'][0]['id']}").json()
    assert entry["request"]["messages"][0]["content"].startswith("please write")
    assert client.get(f"/v1/jobs/{job.id}/agent/999").status_code == 404

    page = client.get(f"/jobs/{job.id}?tab=agent").text
    assert HOSTILE not in page
    for text in ("the author answers", "try 1 by author is checked", "-a = 1", "+a = 2", "the judge: yes", "2,400"):
        assert text in page, text


def test_another_owner_sees_nothing(client: TestClient, story: Callable[..., Story], other_key: str) -> None:
    job = story()
    headers = {"Authorization": f"Bearer {other_key}"}
    assert client.get(f"/v1/jobs/{job.id}/agent", headers=headers).status_code == 404
    decision = {"stage": "generate", "key": "", "approve": True}
    assert client.post(f"/v1/jobs/{job.id}/approvals", json=decision, headers=headers).status_code == 404


def waiting(story: Callable[..., Story], services: Services) -> Story:
    """A job whose generate steps wait for approval."""
    job = story()
    with services.store.writing() as session:
        from sqlalchemy import update

        from onboarding.store.base import JOB

        options = {**job.job.options, "approve": ["generate"]}
        session.execute(update(JOB).where(JOB.c.id == job.id).values(options=options))
    job.tell_until_gaps()
    return job


def test_a_step_waits_in_the_database_until_a_person_decides(
    client: TestClient, story: Callable[..., Story], services: Services
) -> None:
    job = waiting(story, services)
    held = client.get(f"/v1/jobs/{job.id}/agent").json()["waiting"]
    assert {w["stage"] for w in held} == {"generate"}
    assert services.store.ready_steps() == [], "no process can take it"
    row = next(s for s in client.get(f"/v1/jobs/{job.id}").json()["stages"] if s["stage"] == "generate")
    assert row["state"] == "approval"
    assert "Approve" in client.get(f"/jobs/{job.id}?tab=agent").text

    first, second, *_ = [w["key"] for w in held]
    url = f"/v1/jobs/{job.id}/approvals"
    assert client.post(url, json={"stage": "generate", "key": first, "approve": True}).status_code == 202
    assert [step.key for step in services.store.ready_steps()] == [first]
    assert client.post(url, json={"stage": "generate", "key": second, "approve": False}).status_code == 202
    again = client.post(url, json={"stage": "generate", "key": second, "approve": True})
    assert (again.status_code, again.json()["type"].rsplit("/", 1)[-1]) == (409, "nothing-waits")
    declined = next(s for s in services.store.steps(job.id) if s.stage == "generate" and s.key == second)
    assert (declined.state, (declined.result or {})["outcome"]) == ("skipped", "skipped")
    assert "declined by" in (declined.result or {})["summary"]


def test_cancelling_ends_what_waits(client: TestClient, story: Callable[..., Story], services: Services) -> None:
    job = waiting(story, services)
    client.post(f"/v1/jobs/{job.id}/cancel")
    assert client.get(f"/v1/jobs/{job.id}").json()["state"] == "cancelled"
    assert not [s for s in services.store.steps(job.id) if s.state == "waiting"]


def test_an_edited_candidate_is_worked_on_again(
    client: TestClient, story: Callable[..., Story], services: Services
) -> None:
    job = story().tell()
    url = f"/v1/jobs/{job.id}/kernels/{KEY}/candidate"
    before = max(s.attempt for s in services.store.steps(job.id) if (s.stage, s.key) == ("generate", KEY))
    assert "Edit and submit again" in client.get(f"/jobs/{job.id}/kernels/{KEY}").text
    missing = client.put(f"/v1/jobs/{job.id}/kernels/{'0' * 16}/candidate", json={"source": "x"})
    assert missing.status_code == 404
    assert client.put(url, json={"source": "x = 1\r\n"}).status_code == 202
    step = services.store.ready_steps()[0]
    assert (step.stage, step.key, step.attempt) == ("generate", KEY, before + 1)
    assert services.artifacts.get(step.input["candidate"]) == b"x = 1\n"
    assert step.input["parent"]
    assert client.get(f"/v1/jobs/{job.id}").json()["state"] == "running"
    busy = client.put(url, json={"source": "x = 2"})
    assert (busy.status_code, busy.json()["type"].rsplit("/", 1)[-1]) == (409, "job-busy")


def test_novel_modules_and_diagnoses_are_on_the_tab() -> None:
    named = [
        Named(module="A", outcome="operator", words=f"{HOSTILE} attention", digest=KEY, error=1e-15, checks=9, tries=2),
        own_code("B", "nothing was proposed for it"),
    ]
    diagnosis = Diagnosis(cause="kernels", remedy="drop", digests=[KEY], words="grad q is off", by="rules")
    facts = SimpleNamespace(
        agent=SimpleNamespace(waiting=[], entries=[]),
        gaps=SimpleNamespace(novel=named),
        align=SimpleNamespace(diagnosis=diagnosis),
        throughput=None,
        words_of=lambda digest: f"operator {digest}",
    )
    page = environment().get_template("tab_agent.html").render(facts=facts, job=SimpleNamespace(id="j"))
    assert HOSTILE not in page
    for text in ("9 checks", "1.0e-15", "2 proposed", "novel, served by its own torch code", f"/jobs/j/kernels/{KEY}"):
        assert text in page, text
    for text in ("by rules", "kernels; drop", "grad q is off"):
        assert text in page, text
