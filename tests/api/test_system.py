"""Health, readiness, metrics, examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from api.routes import system
from onboarding.examples import example_names
from tests.api.story import Story


def test_health_needs_nothing(anonymous: TestClient) -> None:
    assert anonymous.get("/healthz").json() == {"status": "ok"}


def test_readiness_names_what_is_missing(anonymous: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_ask_broker", lambda _: None)
    answer = anonymous.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)
    monkeypatch.setattr(system, "_ask_broker", lambda _: 1 / 0)
    answer = anonymous.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {"database": "ok", "broker": "ZeroDivisionError", "storage": "ok"}


def test_a_dependency_that_hangs_is_a_timeout(anonymous: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(system, "_ask_broker", lambda _: None)
    monkeypatch.setattr(system, "_ask_storage", lambda _: release.wait(30))
    monkeypatch.setattr(system, "CHECK_TIMEOUT_S", 0.2)
    answer = anonymous.get("/readyz")
    release.set()
    assert answer.json()["checks"]["storage"] == "timeout"


def value(text: str, line: str) -> float:
    """One sample of the Prometheus text."""
    return float(next(item.split(" ")[-1] for item in text.splitlines() if item.startswith(line + " ")))


def test_metrics(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    for _ in range(3):
        client.get(f"/v1/jobs/{job.id}")
    story("second").tell()
    text = client.get("/metrics").text
    label = 'method="GET",route="/v1/jobs/{job_id}",status="200"'
    assert value(text, "onboard_http_requests_total{" + label + "}") == 3
    assert job.id not in text  # the template, never the path
    assert value(text, 'onboard_jobs{state="queued"}') == 1
    assert value(text, 'onboard_queue_depth{queue="cpu",state="ready"}') == 1
    assert value(text, 'onboard_oldest_ready_seconds{queue="cpu"}') >= 0
    assert value(text, 'onboard_stage_seconds_count{stage="judge",state="succeeded"}') == 3
    assert value(text, 'onboard_job_seconds_count{state="succeeded"}') == 1
    # A second scrape counts nothing twice.
    again = client.get("/metrics").text
    assert value(again, 'onboard_stage_seconds_count{stage="judge",state="succeeded"}') == 3


def test_unmatched_paths_share_a_label(client: TestClient) -> None:
    for i in range(3):
        client.get(f"/nothing/{i}")
    text = client.get("/metrics").text
    assert value(text, 'onboard_http_requests_total{method="GET",route="(unmatched)",status="404"}') == 3


def test_examples(client: TestClient) -> None:
    found = client.get("/v1/examples").json()
    assert [item["name"] for item in found] == example_names()
    assert {item["model_type"] for item in found} >= {"kimi_linear", "llama", "deepseek_v3", "qwen3_moe"}


def test_a_sign_in_link_for_the_key(client: TestClient) -> None:
    answer = client.post("/v1/signin-links")
    assert answer.status_code == 201
    assert answer.json()["url"].startswith("http://127.0.0.1:8040/signin?token=")


def test_openapi_describes_both_bodies_and_the_problem(client: TestClient) -> None:
    described = client.get("/v1/openapi.json").json()
    post = described["paths"]["/v1/jobs"]["post"]
    assert set(post["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    assert "application/problem+json" in post["responses"]["422"]["content"]
