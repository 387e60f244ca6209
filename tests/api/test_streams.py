"""Events over SSE, logs by offset, artifacts as downloads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.app import create_app
from api.auth import ensure_first_key
from api.deps import Services
from api.logs import whole_characters
from onboarding.settings import Settings
from tests.api.live_server import free_port, serving
from tests.api.story import HOSTILE, Story


def frames(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events out of their lines (WHATWG, "Server-sent events", 9.2.6)."""
    frame: dict[str, Any] = {}
    for line in lines:
        if not line:
            if frame:
                yield frame
            frame = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            frame[name] = json.loads(value) if name == "data" else value


def stream(client: TestClient, job_id: str, **request: Any) -> list[dict[str, Any]]:
    """All frames of a job that has ended."""
    answer = client.get(f"/v1/jobs/{job_id}/events", **request)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(frames(iter(answer.text.split("\n"))))


def test_the_whole_story_in_order(client: TestClient, story: Callable[..., Story], services: Services) -> None:
    job = story().tell()
    found = stream(client, job.id)
    assert found[-1]["event"] == "end"
    numbers = [int(frame["id"]) for frame in found[:-1]]
    last = services.store.get_job(job.id)
    assert last is not None
    assert numbers == list(range(1, last.last_seq + 1))
    assert [frame["data"]["seq"] for frame in found[:-1]] == numbers
    assert found[0]["data"]["data"] == {"state": "queued"}


@pytest.mark.parametrize("after", [0, 1, 17, 10_000])
def test_resume_by_last_event_id(client: TestClient, story: Callable[..., Story], after: int) -> None:
    job = story().tell()
    everything = stream(client, job.id)
    rest = stream(client, job.id, headers={"Last-Event-ID": str(after)})
    assert rest == everything[min(after, len(everything) - 1) :]
    assert stream(client, job.id, params={"after": after}) == rest


def test_long_stories_come_whole(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.begin("intake")
    job.metrics(*(("loss", step, 1.0) for step in range(1203)))
    client.post(f"/v1/jobs/{job.id}/cancel")
    job.store.finish_step(job.step("intake").id or 0, "story", "cancelled")
    found = stream(client, job.id)[:-1]
    assert [int(frame["id"]) for frame in found] == list(range(1, len(found) + 1))
    assert sum(frame["event"] == "metric" for frame in found) == 1203


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 30])
def test_bad_last_event_id(client: TestClient, story: Callable[..., Story], value: str) -> None:
    answer = client.get(f"/v1/jobs/{story().id}/events", headers={"Last-Event-ID": value})
    assert answer.status_code == 400


def test_live_events_reach_every_listener_and_the_tailer_goes(home: Any) -> None:
    port = free_port()
    settings = Settings(port=port)
    app = create_app(settings)
    services: Services = app.state.services
    with serving(app, port) as base:
        first = ensure_first_key(services.store, settings)
        job = Story(services.store, services.artifacts, settings, first.owner, "live")
        headers = {"Authorization": f"Bearer {first.secret}"}
        heard: list[list[str]] = [[], [], []]
        ready = [threading.Event() for _ in heard]

        def listen(index: int) -> None:
            url = f"{base}/v1/jobs/{job.id}/events"
            with httpx.stream("GET", url, headers=headers, timeout=30, trust_env=False) as answer:
                for frame in frames(answer.iter_lines()):
                    heard[index].append(frame["event"])
                    ready[index].set()

        threads = [threading.Thread(target=listen, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for event in ready:
            assert event.wait(20)
        assert len(services.tailers) == 1  # one for the job, however many listen
        told = time.monotonic()
        job.tell()
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - told < 10
        assert all(kinds[-1] == "end" for kinds in heard)
        assert heard[0] == heard[1] == heard[2]
        deadline = time.monotonic() + 5
        while len(services.tailers):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_logs_by_offset(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.begin("intake")
    path = f"/v1/jobs/{job.id}/logs/intake"
    first = client.get(path)
    assert first.text == "intake begins\n"
    assert first.headers["content-type"] == "text/plain; charset=utf-8"
    offset = first.headers["onboard-next-offset"]
    assert client.get(path, params={"offset": offset}).text == ""
    job.log("intake", f"naïve {HOSTILE}")
    rest = client.get(path, params={"offset": offset})
    assert rest.text == f"naïve {HOSTILE}\n"
    assert client.get(path, params={"offset": -5}).text == rest.text[-5:]
    assert client.get(path, params={"offset": 10**9}).text == ""
    assert client.get(f"/v1/jobs/{job.id}/logs/parse").text == ""
    assert client.get(path, params={"key": "../../etc"}).status_code == 422
    download = client.get(path, params={"download": True})
    assert download.headers["content-disposition"] == 'attachment; filename="intake.log"'


@pytest.mark.parametrize("text", ["", "abc", "naïve", "€", "日本", "🎉🎉"])
def test_a_log_is_never_cut_inside_a_character(text: str) -> None:
    raw = text.encode()
    for cut in range(len(raw) + 1):
        part = raw[: whole_characters(raw[:cut])]
        assert text.startswith(part.decode("utf-8"))
        assert cut - len(part) < 4


def test_artifacts_are_downloads(client: TestClient, story: Callable[..., Story]) -> None:
    job = story().tell()
    listed = client.get(f"/v1/jobs/{job.id}/artifacts").json()
    report = next(item for item in listed if item["name"] == "report.html")
    answer = client.get(report["href"])
    assert answer.content == f"<h1>{HOSTILE}</h1>".encode()
    assert answer.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["etag"] == f'"{report["digest"]}"'


def test_only_a_jobs_own_artifacts(client: TestClient, story: Callable[..., Story], services: Services) -> None:
    foreign = services.artifacts.put(b"x", name="x", media_type="text/plain").digest
    job = story().tell()
    assert client.get(f"/v1/jobs/{job.id}/artifacts/{foreign}").status_code == 404
    assert client.get(f"/v1/jobs/{job.id}/artifacts/..%2f..%2fetc").status_code in (404, 422)


def test_damage_is_noticed(client: TestClient, story: Callable[..., Story], app: FastAPI, services: Services) -> None:
    job = story().tell()
    digest = client.get(f"/v1/jobs/{job.id}/artifacts").json()[-1]["digest"]
    path = services.settings.resolved_home / "artifacts" / digest[:2] / digest
    path.write_bytes(b"changed")
    answer = client.get(f"/v1/jobs/{job.id}/artifacts/{digest}")
    assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[1]) == (500, "artifact-damaged")
    path.unlink()
    assert client.get(f"/v1/jobs/{job.id}/artifacts/{digest}").status_code == 410
