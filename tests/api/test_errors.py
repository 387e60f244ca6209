"""Every refusal is problem+json with a stable type and the right code, and leaves no job behind."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest
from fastapi.testclient import TestClient

from onboarding.problem import PROBLEM_BASE


def problem(answer: Any, status: int, kind: str) -> dict[str, Any]:
    """Check the shape that every error has, and return it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["type"] == PROBLEM_BASE + kind
    assert body["status"] == status
    assert body["title"]
    assert isinstance(body["detail"], str)
    assert body["instance"].startswith("/")
    return body


def no_jobs(client: TestClient) -> bool:
    """Whether nothing was made."""
    return bool(client.get("/v1/jobs").json()["jobs"] == [])


def archive(name: str, content: bytes = b"{}", **fields: Any) -> bytes:
    """A tar with one entry."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        for field, value in fields.items():
            setattr(member, field, value)
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def test_unknown_route(client: TestClient) -> None:
    problem(client.get("/v1/nothing"), 404, "not-found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/jobs", "GET, POST"),
        ("DELETE", "/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV", "GET"),
        ("GET", "/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV/cancel", "POST"),
    ],
)
def test_wrong_method_says_which_are_right(client: TestClient, method: str, path: str, allow: str) -> None:
    answer = client.request(method, path)
    problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == allow


def test_wrong_content_type(client: TestClient) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        answer = client.post("/v1/jobs", content=b"{}", headers={"content-type": content_type})
        problem(answer, 415, "unsupported-media-type")
    problem(client.post("/v1/jobs", content=b"{}"), 415, "unsupported-media-type")
    assert no_jobs(client)


def test_oversized_body_is_refused_by_its_length(client: TestClient) -> None:
    limit = 64 * 2**20 + 2**20
    answer = client.post("/v1/jobs", content=b" " * (limit + 1), headers={"content-type": "application/json"})
    assert problem(answer, 413, "too-large")["limit"] == limit


def test_oversized_body_is_counted_when_it_comes_without_length(client: TestClient) -> None:
    chunks = (b" " * 2**20 for _ in range(70))
    answer = client.post("/v1/jobs", content=chunks, headers={"content-type": "application/json"})
    problem(answer, 413, "too-large")
    assert no_jobs(client)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", "malformed-json"),
        (b"\xff\xfe", "malformed-json"),
        (b"[" * 100_000, "malformed-json"),
        (b"[]", "invalid-request"),
        (b"{}", "invalid-request"),
        (b'{"example": "llama-3.1-8b", "config": {}}', "invalid-request"),
        (b'{"example": "no-such"}', "unknown-example"),
        (b'{"example": "llama-3.1-8b", "surprise": 1}', "invalid-request"),
        (b'{"example": "llama-3.1-8b", "options": {"profile": "huge"}}', "invalid-request"),
        (b'{"example": "llama-3.1-8b", "options": {"sequence_length": 0}}', "invalid-request"),
        (b'{"config": {}}', "config-no-model-type"),
        (b'{"config": {"model_type": "never_heard_of"}}', "unknown-model-type"),
    ],
)
def test_malformed_json_bodies(client: TestClient, body: bytes, kind: str) -> None:
    answer = client.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    problem(answer, 422, kind)
    assert no_jobs(client)


def test_the_place_of_the_fault_is_named(client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=b'{\n "config": x}', headers={"content-type": "application/json"})
    body = problem(answer, 422, "malformed-json")
    assert (body["line"], body["column"]) == (2, 12)
    answer = client.post("/v1/jobs", json={"example": "llama-3.1-8b", "options": {"seed": "x"}})
    assert problem(answer, 422, "invalid-request")["field"] == "options.seed"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([("config.json", b"not json")], "config-not-json"),
        ([("model.bin", b"\x80\x04"), ("config.json", b"{}")], "pickled-weights"),
        ([("a.tar", archive("../config.json"))], "unsafe-path"),
        ([("a.tar", archive("config.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"))], "unsafe-entry"),
        ([("modeling.py", b"x = 1")], "no-config"),
        ([("config.json", b"{}"), ("config.json", b"{}")], "duplicate-file"),
    ],
)
def test_malformed_uploads(client: TestClient, files: list[tuple[str, bytes]], kind: str) -> None:
    answer = client.post("/v1/jobs", files=[("files", file) for file in files])
    problem(answer, 422, kind)
    assert no_jobs(client)


def test_broken_forms(client: TestClient) -> None:
    upload = ("files", ("config.json", b"{}"))
    problem(client.post("/v1/jobs", files=[("other", ("a", b"b"))]), 422, "invalid-request")
    problem(client.post("/v1/jobs", files=[upload], data={"options": "{"}), 422, "malformed-json")
    answer = client.post("/v1/jobs", content=b"junk", headers={"content-type": "multipart/form-data"})
    problem(answer, 400, "bad-request")
    assert no_jobs(client)


@pytest.mark.parametrize("query", ["limit=0", "limit=1000", "cursor=../x", "state=sleeping"])
def test_bad_queries(client: TestClient, query: str) -> None:
    body = problem(client.get(f"/v1/jobs?{query}"), 422, "invalid-request")
    assert body["field"] == query.split("=")[0]
    assert body["errors"]


def test_unknown_objects_are_404(client: TestClient) -> None:
    for path in ("/v1/jobs/nope", "/v1/jobs/nope/events", "/v1/jobs/nope/artifacts", "/v1/jobs/nope/stages/parse"):
        problem(client.get(path), 404, "not-found")


def test_a_crash_is_a_problem_without_its_traceback(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onboarding.store.Store.list_jobs", lambda *_, **__: 1 / 0)
    body = problem(client.get("/v1/jobs"), 500, "internal-error")
    assert "ZeroDivision" not in json.dumps(body)


def test_a_browser_gets_a_page(client: TestClient) -> None:
    answer = client.get("/jobs/nope", headers={"accept": "text/html"})
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/html")
    assert "no such job" in answer.text
