"""Submitting, listing, looking at, cancelling and retrying jobs."""

from __future__ import annotations

import io
import json
import threading
import uuid
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.deps import Services
from api.routes import jobs as job_routes
from onboarding.examples import example_config, example_files, example_names
from onboarding.pipeline import STAGES
from onboarding.stages.intake.check import check_definition
from tests.api.story import DIGESTS, Story

CONFIG = example_config("llama-3.1-8b")


def submit(client: TestClient, **request: Any) -> dict[str, Any]:
    """Submit and check what every accepted job answers with."""
    answer = client.post("/v1/jobs", **request)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert client.get(answer.headers["location"]).json()["id"] == job["id"]
    return job


@pytest.mark.parametrize("name", example_names())
def test_every_example_is_accepted(client: TestClient, services: Services, name: str) -> None:
    job = submit(client, json={"example": name, "options": {"profile": "quick"}})
    assert (job["name"], job["state"], job["profile"]) == (name, "queued", "quick")
    assert job["model_type"] == example_config(name)["model_type"]
    assert [stage["stage"] for stage in job["stages"]] == [stage.name for stage in STAGES]
    assert job["stages"][0]["state"] == "ready"
    assert {stage["state"] for stage in job["stages"][1:]} == {"waiting"}
    # What is stored is what intake will read.
    stored = check_definition(services.artifacts.get(job["definition"]))
    assert stored.files == example_files(name)


def test_all_ways_to_send_a_configuration_store_the_same(client: TestClient, services: Services) -> None:
    raw = json.dumps(CONFIG).encode()
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("llama/config.json", raw)
    ways: list[dict[str, Any]] = [
        {"json": {"config": CONFIG}},
        {"files": {"files": ("config.json", raw)}},
        {"files": {"files": ("renamed.json", raw)}},
        {"files": {"files": ("llama.zip", zipped.getvalue())}},
    ]
    digests = {submit(client, **way)["definition"] for way in ways}
    assert len(digests) == 1
    assert json.loads(services.artifacts.get(digests.pop())) == CONFIG


def test_several_files_keep_their_names(client: TestClient, services: Services) -> None:
    files = [("files", ("config.json", json.dumps(CONFIG).encode())), ("files", ("src/modeling_x.py", b"x = 1\n"))]
    job = submit(client, files=files, data={"name": "mine", "options": '{"seed": 3}'})
    assert (job["name"], job["options"]["seed"]) == ("mine", 3)
    stored = check_definition(services.artifacts.get(job["definition"]))
    assert stored.files["src/modeling_x.py"] == b"x = 1\n"
    assert stored.has_code


class TestIdempotency:
    """The same key and request give the stored answer."""

    def test_repeated(self, client: TestClient) -> None:
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        first = submit(client, json={"example": "llama-3.1-8b"}, headers=headers)
        again = submit(client, json={"example": "llama-3.1-8b"}, headers=headers)
        assert first == again
        assert len(client.get("/v1/jobs").json()["jobs"]) == 1

    def test_another_request_under_the_key(self, client: TestClient) -> None:
        headers = {"Idempotency-Key": "k"}
        submit(client, json={"example": "llama-3.1-8b"}, headers=headers)
        answer = client.post("/v1/jobs", json={"example": "kimi-linear"}, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["type"].endswith("/idempotency-key-reused")

    def test_keys_are_scoped_by_owner(self, client: TestClient, other_key: str) -> None:
        headers = {"Idempotency-Key": "k"}
        mine = submit(client, json={"example": "llama-3.1-8b"}, headers=headers)
        theirs = {**headers, "Authorization": f"Bearer {other_key}"}
        assert client.post("/v1/jobs", json={"example": "llama-3.1-8b"}, headers=theirs).json()["id"] != mine["id"]

    def test_a_refused_request_frees_the_key(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        headers = {"Idempotency-Key": "k"}
        with monkeypatch.context() as patch:
            patch.setattr(job_routes, "create", lambda *_: 1 / 0)
            assert client.post("/v1/jobs", json={"example": "llama-3.1-8b"}, headers=headers).status_code == 500
        submit(client, json={"example": "llama-3.1-8b"}, headers=headers)

    def test_in_flight(self, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        headers = {"Idempotency-Key": "k"}
        entered, go_on = threading.Event(), threading.Event()
        create = job_routes.create

        def slow(*arguments: Any) -> Any:
            entered.set()
            assert go_on.wait(20)
            return create(*arguments)

        monkeypatch.setattr(job_routes, "create", slow)
        answers: list[Any] = []
        request: dict[str, Any] = {"json": {"example": "llama-3.1-8b"}, "headers": headers}
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/jobs", **request)))
        thread.start()
        assert entered.wait(20)
        second = client.post("/v1/jobs", **request)
        go_on.set()
        thread.join()
        assert second.status_code == 409
        assert second.headers["retry-after"] == "1"
        assert answers[0].status_code == 202
        assert client.post("/v1/jobs", **request).json()["id"] == answers[0].json()["id"]

    @pytest.mark.parametrize("value", ["", "x" * 256, "tab\there"])
    def test_malformed(self, client: TestClient, value: str) -> None:
        answer = client.post("/v1/jobs", json={"example": "llama-3.1-8b"}, headers={"Idempotency-Key": value})
        assert answer.status_code == 400


def test_pages_hold_every_job_once_newest_first(client: TestClient, story: Callable[..., Story]) -> None:
    made = [story(f"model-{i}").id for i in range(7)]
    seen: list[str] = []
    cursor = None
    for _ in range(10):
        page = client.get("/v1/jobs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
        seen += [job["id"] for job in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
        story("late")  # a job made while paging does not shift the pages
    assert seen == made[::-1]


def test_filters(client: TestClient, story: Callable[..., Story]) -> None:
    story("alpha").begin("intake")
    story("beta")
    assert [job["name"] for job in client.get("/v1/jobs?state=running").json()["jobs"]] == ["alpha"]
    assert [job["name"] for job in client.get("/v1/jobs?name=BET").json()["jobs"]] == ["beta"]


def test_a_job_shows_its_stages(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.tell_until_gaps()
    first = next(iter(DIGESTS.values()))
    job.begin("generate", first)
    job.progress("generate", 1, 4, "folding flags", first)
    body = client.get(f"/v1/jobs/{job.id}").json()
    rows = {row["stage"]: row for row in body["stages"]}
    assert body["state"] == "running"
    assert rows["parse"]["state"] == "succeeded"
    assert rows["parse"]["summary"] == "27 layers: 20 KDA + 7 MLA"
    assert (rows["generate"]["done"], rows["generate"]["total"]) == (0, 3)
    assert rows["generate"]["fraction"] == pytest.approx(0.25 / 3)
    assert rows["generate"]["label"] == "folding flags"
    assert rows["judge"]["state"] == "waiting"


def test_stage_results(client: TestClient, story: Callable[..., Story]) -> None:
    job = story().tell()
    parse = client.get(f"/v1/jobs/{job.id}/stages/parse").json()
    assert [item["key"] for item in parse["results"]] == [""]
    assert parse["results"][0]["result"]["architecture"]["census"]["total"] == 49_100_000_000
    judge = client.get(f"/v1/jobs/{job.id}/stages/judge").json()
    assert {item["key"] for item in judge["results"]} == set(DIGESTS.values())
    assert all(item["result"]["outcome"] == "accepted" for item in judge["results"])
    assert client.get(f"/v1/jobs/{job.id}/stages/dream").status_code == 404


def test_cancel_then_retry(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    cancelled = client.post(f"/v1/jobs/{job.id}/cancel")
    assert cancelled.status_code == 202
    assert cancelled.json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job.id}/cancel").status_code == 202
    again = client.post(f"/v1/jobs/{job.id}/retry")
    assert again.status_code == 202
    assert again.json()["stages"][0]["attempt"] == 2
    refused = client.post(f"/v1/jobs/{job.id}/retry")
    assert refused.status_code == 409
    assert refused.json()["type"].endswith("/job-not-retryable")


def test_a_failed_job_keeps_its_evidence(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.begin("intake")
    job.fail("intake", {"type": "https://onboard.invalid/problems/x", "title": "no", "status": 422, "detail": "d"})
    body = client.get(f"/v1/jobs/{job.id}").json()
    assert body["state"] == "failed"
    assert body["problem"]["title"] == "no"
    assert "intake begins" in client.get(f"/v1/jobs/{job.id}/logs/intake").text
