"""The store on SQLite and PostgreSQL: transitions, leases, events without gaps, access, four racing advancers."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlmodel import SQLModel

from onboarding.pipeline import JobOptions
from onboarding.problem import Problem
from onboarding.records import Job, Step
from onboarding.store import NewEvent, Store
from onboarding.store.steps import MAX_TAKEOVERS

ME, LEASE_S = "me", 30.0
EXPIRED_S = -1.0
"""A lease that has run out when it is given."""


def new_job(store: Store, **more: Any) -> Job:
    values = {"name": "toy", "model_type": "toy", "owner": "owner", "definition": "0" * 64} | more
    return store.create_job(**values)


def claim(store: Store, owner: str = ME, lease_s: float = LEASE_S) -> Step:
    """Claim the oldest ready step."""
    step_id = store.ready_steps()[0].id
    assert step_id is not None
    step = store.claim_step(step_id, owner, lease_s)
    assert step is not None
    return step


def result_of(step: Step, **more: Any) -> dict[str, Any]:
    gaps = {"gaps": ["aa", "bb", "cc"]} if step.stage == "gaps" else {}
    return {"outcome": "ok", "summary": f"{step.stage} done", **gaps, **more}


def finish(store: Store, step: Step, **more: Any) -> list[Step] | None:
    assert step.id is not None
    return store.finish_step(step.id, ME, "succeeded", result=result_of(step, **more))


def test_the_migrated_schema_is_the_declared_one(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []


def test_the_oldest_job_goes_on_before_a_younger_one_begins(store: Store) -> None:
    first, second = sorted([new_job(store).id, new_job(store).id])
    finish(store, claim(store))  # the first job's next step is newer than the second job's only one
    assert [step.job_id for step in store.ready_steps()] == [first, second]
    assert [step.stage for step in store.ready_steps()] == ["parse", "intake"]


def test_a_job_runs_to_its_end_with_an_event_for_every_change(store: Store) -> None:
    job = new_job(store, options=JobOptions(profile="quick"))
    order = []
    while ready := store.ready_steps():
        step = claim(store)
        assert step.id == ready[0].id
        order.append(step.stage)
        assert finish(store, step) is not None
    first = ["intake", "parse", "gaps", *["generate"] * 3, *["judge"] * 3, *["tune"] * 3]
    assert order == [*first, "align", "throughput", "scale", "package"]
    ended = store.get_job(job.id)
    assert ended is not None
    assert ended.state == "succeeded"
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert ended.created_at <= ended.started_at <= ended.finished_at
    assert ended.created_at.utcoffset() == timedelta(0)
    events = store.events_since(job.id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    states = Counter((event.kind, event.data["state"]) for event in events)
    assert states == {
        ("job", "queued"): 1,
        ("job", "running"): 1,
        ("job", "succeeded"): 1,
        ("step", "ready"): 16,
        ("step", "running"): 16,
        ("step", "succeeded"): 16,
    }


def test_only_one_claim_succeeds_and_only_the_holder_may_finish(store: Store) -> None:
    new_job(store)
    step = claim(store)
    assert step.id is not None
    assert store.claim_step(step.id, "other", LEASE_S) is None
    assert store.heartbeat(step.id, ME, LEASE_S).held
    assert not store.heartbeat(step.id, "other", LEASE_S).held
    assert store.finish_step(step.id, "other", "succeeded", result={}) is None
    assert [s.stage for s in finish(store, step) or []] == ["parse"]
    assert finish(store, step) is None, "a finished step is not finished twice"


def test_an_expired_lease_is_taken_over_and_the_old_holder_fenced_off(store: Store) -> None:
    job = new_job(store)
    step = claim(store, lease_s=EXPIRED_S)
    assert [(s.id, s.attempt, s.takeovers) for s in store.take_over_expired()] == [(step.id, 1, 1)]
    assert store.take_over_expired() == []
    assert finish(store, step) is None
    again = claim(store, "other")
    assert (again.id, again.attempt) == (step.id, 1)
    assert [s.state for s in store.steps(job.id)] == ["running"]


def test_a_lease_in_force_is_not_taken_over(store: Store) -> None:
    new_job(store)
    claim(store)
    assert store.take_over_expired() == []


def test_a_step_that_keeps_dying_fails(store: Store) -> None:
    job = new_job(store)
    for _ in range(MAX_TAKEOVERS):
        step = claim(store)
        assert step.id is not None
        assert [s.id for s in store.step_died(step.id, ME, "signal 9") or []] == [step.id]
    step = claim(store)
    assert step.id is not None
    assert store.step_died(step.id, ME, "signal 9") == []
    ended = store.get_job(job.id)
    assert ended is not None
    assert ended.state == "failed"
    assert ended.problem is not None
    assert ended.problem["type"].endswith("/step-keeps-dying")
    assert "signal 9" in ended.problem["detail"]


def test_giving_a_step_back_costs_no_takeover(store: Store) -> None:
    new_job(store)
    for _ in range(MAX_TAKEOVERS + 2):
        step = claim(store)
        assert step.id is not None
        assert store.release_step(step.id, ME) is not None
    assert store.ready_steps()[0].takeovers == 0


def test_cancel_ends_what_waits_at_once_and_what_runs_when_it_is_told(store: Store) -> None:
    waiting = new_job(store)
    assert store.request_cancel(waiting.id).state == "cancelled"
    assert [s.state for s in store.steps(waiting.id)] == ["cancelled"]

    job = new_job(store)
    step = claim(store)
    assert step.id is not None
    assert store.request_cancel(job.id).state == "running"
    assert store.heartbeat(step.id, ME, LEASE_S).cancel
    assert store.cancel_requested(job.id)
    assert store.finish_step(step.id, ME, "cancelled") == []
    assert store.request_cancel(job.id).state == "cancelled", "cancelling twice is the same"


def test_a_cancelled_step_whose_runner_died_is_not_run_again(store: Store) -> None:
    job = new_job(store)
    claim(store, lease_s=EXPIRED_S)
    store.request_cancel(job.id)
    assert store.take_over_expired() == []
    ended = store.get_job(job.id)
    assert ended is not None
    assert ended.state == "cancelled"


def test_retry_goes_on_from_what_failed_and_keeps_what_is_done(store: Store) -> None:
    job = new_job(store)
    finish(store, claim(store))
    step = claim(store)
    assert step.id is not None
    problem = Problem("broken", "it broke").to_dict()
    store.finish_step(step.id, ME, "failed", problem=problem)
    failed = store.get_job(job.id)
    assert failed is not None
    assert failed.problem == {**problem, "stage": "parse", "key": "", "attempt": 1}
    assert store.retry(job.id).state == "running"
    assert [(s.stage, s.attempt, s.state) for s in store.steps(job.id)] == [
        ("intake", 1, "succeeded"),
        ("parse", 1, "failed"),
        ("parse", 2, "ready"),
    ]
    with pytest.raises(Problem, match="only a failed or cancelled job"):
        store.retry(job.id)


def test_retry_of_a_job_that_cannot_align_tries_alignment_anew(store: Store) -> None:
    job = new_job(store)
    for _ in range(3):
        step = claim(store)
        assert step.id is not None
        store.finish_step(step.id, ME, "succeeded", result={"outcome": "ok", "gaps": []})
    finish(store, claim(store), outcome="misaligned", culprits=[])
    failed = store.get_job(job.id)
    assert failed is not None
    assert failed.state == "failed"
    store.retry(job.id)
    assert [(s.stage, s.attempt) for s in store.ready_steps()] == [("align", 2)]


def test_results_are_those_of_the_newest_success(store: Store) -> None:
    job = new_job(store)
    assert store.load_result(job.id, "intake") is None
    finish(store, claim(store), summary="first")
    assert (store.load_result(job.id, "intake") or {})["summary"] == "first"


def test_earlier_results_are_of_the_owners_jobs_that_succeeded_on_the_same_definition(store: Store) -> None:
    jobs = [
        new_job(store),
        new_job(store),
        new_job(store),
        new_job(store, owner="someone else"),
        new_job(store, definition="1" * 64),
        new_job(store),
    ]
    for job in jobs[:5]:
        step = next(s for s in store.ready_steps() if s.job_id == job.id)
        assert step.id is not None
        assert store.claim_step(step.id, ME, LEASE_S) is not None
        finish(store, step, summary=job.id)
    with store.writing() as session:
        session.execute(text("UPDATE job SET state = 'succeeded' WHERE id != :id"), {"id": jobs[2].id})
    found = store.earlier_results(jobs[5].id, "intake")
    assert [(job_id, result["summary"]) for job_id, result in found] == [(jobs[i].id, jobs[i].id) for i in (1, 0)]
    assert store.earlier_results(jobs[1].id, "intake")[0][0] == jobs[0].id
    assert store.earlier_results(jobs[0].id, "intake") == store.earlier_results(jobs[5].id, "align") == []


def test_jobs_come_in_pages_newest_first(store: Store) -> None:
    ids = [new_job(store, name=f"Model {i}").id for i in range(5)]
    other = new_job(store, owner="someone else")
    seen, cursor = [], None
    while True:
        page = store.list_jobs("owner", cursor=cursor, limit=2)
        seen += [job.id for job in page.jobs]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert [job.id for job in store.list_jobs("owner", name="model 3").jobs] == [ids[3]]
    assert store.list_jobs("owner", name="%").jobs == []
    store.request_cancel(ids[0])
    assert [job.id for job in store.list_jobs("owner", state="cancelled").jobs] == [ids[0]]
    assert store.get_job(other.id, "owner") is None


def test_artifacts_are_listed_once(store: Store) -> None:
    job = new_job(store)
    data = {"digest": "1" * 64, "name": "kernel.py", "size": 3, "media_type": "text/x-python"}
    for _ in range(2):
        store.append_events(job.id, [NewEvent(kind="artifact", stage="generate", key="aa", data=data)])
    assert [(a.name, a.digest, a.size) for a in store.artifacts(job.id)] == [("kernel.py", "1" * 64, 3)]
    assert store.artifact_of(job.id, "1" * 64) is not None
    assert store.artifact_of(new_job(store).id, "1" * 64) is None, "only through a job that lists it"


def test_the_newest_progress_of_each_step(store: Store) -> None:
    job = new_job(store)
    for key, done in (("aa", 1), ("bb", 1), ("aa", 2)):
        store.append_events(job.id, [NewEvent(kind="progress", stage="judge", key=key, data={"done": done})])
    assert store.latest_progress(job.id) == {("judge", "aa"): {"done": 2}, ("judge", "bb"): {"done": 1}}


def test_keys_links_and_sessions(store: Store) -> None:
    key, secret = store.create_key("laptop")
    found = store.authenticate(secret)
    assert found is not None
    assert found.id == key.id
    assert secret not in repr(found), "only a hash is stored"
    assert store.authenticate(secret + "x") is None
    _, expired = store.create_key("old", ttl=timedelta(seconds=-1))
    assert store.authenticate(expired) is None

    link = store.create_link(key.id)
    session = store.redeem(link)
    assert session is not None
    assert store.redeem(link) is None, "a link works once"
    assert store.session_owner(session) == key.id
    assert store.session_owner(link) is None, "a link is not a session"
    assert store.redeem(store.create_link(key.id, ttl=timedelta(seconds=-1))) is None
    store.end_session(session)
    assert store.session_owner(session) is None


def test_an_idempotency_key_is_carried_out_once(store: Store) -> None:
    post = ("owner", "POST /v1/jobs", "key-1")
    assert store.begin_idempotent(*post, "body").state == "new"
    assert store.begin_idempotent(*post, "body").state == "in_flight"
    assert store.begin_idempotent(*post, "other").state == "other_body"
    assert store.begin_idempotent("someone else", *post[1:], "other").state == "new"
    store.finish_idempotent(*post, 202, {"id": "j"})
    answered = store.begin_idempotent(*post, "body")
    assert (answered.state, answered.status, answered.response) == ("answered", 202, {"id": "j"})
    store.forget_idempotent(*post)
    assert store.begin_idempotent(*post, "body").state == "new"


def compete(url: str, worker: int) -> None:
    """What one of four processes does: start on an empty database, write events, and advance the job to its end."""
    store, owner = Store(url), f"worker {worker}"
    store.migrate()
    while not (jobs := store.list_jobs().jobs):
        continue
    job_id = jobs[0].id
    for i in range(20):
        store.append_events(job_id, [NewEvent(kind="metric", data={"by": owner, "i": i, "part": p}) for p in (0, 1)])
    while True:
        job = store.get_job(job_id)
        assert job is not None
        if job.state == "succeeded":
            return
        for ready in store.ready_steps():
            assert ready.id is not None
            step = store.claim_step(ready.id, owner, LEASE_S)
            if step is None:
                continue
            store.append_events(job_id, [NewEvent(kind="metric", stage=step.stage, key=step.key, data={"by": owner})])
            assert store.finish_step(ready.id, owner, "succeeded", result=result_of(step)) is not None


def test_four_processes_race_from_an_empty_database_to_the_end_of_a_job(database_url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=compete, args=(database_url, i)) for i in range(4)]
    for process in processes:
        process.start()
    store = Store(database_url)
    store.migrate()
    job = new_job(store)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    with store.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1

    events = store.events_since(job.id, 0, 1000)
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "no gaps"
    for worker in range(4):
        own = [
            (e.data["i"], e.data["part"]) for e in events if e.data.get("by") == f"worker {worker}" and "i" in e.data
        ]
        assert own == [(i, part) for i in range(20) for part in (0, 1)], "one writer's events are all there, in order"
    ran = Counter((e.stage, e.key) for e in events if e.kind == "metric" and e.stage)
    assert (len(ran), set(ran.values())) == (16, {1}), "each step ran once"
    assert {(s.attempt, s.state, s.takeovers) for s in store.steps(job.id)} == {(1, "succeeded", 0)}
    store.close()
