"""Who may do what: keys, links, sessions, origins, hosts, owners."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from api.app import create_app
from api.auth import ensure_first_key, sign_in_url
from api.deps import Services
from api.security import CSP, SESSION_COOKIE
from onboarding.records import ApiKey
from onboarding.settings import Settings
from tests.api.conftest import BASE
from tests.api.story import Story

OPEN = {"/healthz", "/readyz", "/static/{name}", "/signin", "/signout", "/v1/openapi.json"}


@pytest.fixture
def browser(anonymous: TestClient, services: Services, settings: Settings, key: str) -> TestClient:
    """A client that signed in through a link."""
    owner = ensure_first_key(services.store, settings).owner
    answer = anonymous.get(sign_in_url(services.store, owner, BASE))
    assert answer.status_code == 303
    return anonymous


def test_everything_but_the_open_routes_needs_credentials(app: FastAPI, anonymous: TestClient) -> None:
    seen = 0
    for context in iter_route_contexts(app.routes):
        assert context.path is not None
        if context.path in OPEN:
            continue
        path = re.sub(r"{[^}]*}", "1", context.path.replace("{stage}", "parse").replace("{digest}", "a" * 64))
        for method in (context.methods or set()) - {"HEAD"}:
            answer = anonymous.request(method, path)
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.headers["www-authenticate"].startswith("Bearer")
            seen += 1
    assert seen >= 18


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer onb_wrong", "Basic {key}", "{key}"])
def test_bad_headers(anonymous: TestClient, key: str, header: str) -> None:
    assert anonymous.get("/v1/jobs", headers={"Authorization": header.format(key=key)}).status_code == 401


def test_a_bad_key_does_not_fall_back_to_the_cookie(browser: TestClient) -> None:
    assert browser.get("/v1/jobs").status_code == 200
    assert browser.get("/v1/jobs", headers={"Authorization": "Bearer onb_wrong"}).status_code == 401


def test_the_key_file_is_private_and_its_secret_is_not_stored(client: TestClient, services: Services, key: str) -> None:
    path = services.settings.key_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with services.store.reading() as session:
        stored = [row.model_dump_json() for row in session.query(ApiKey)]
    assert len(stored) == 1
    assert key not in stored[0]


def test_first_start_prints_the_key_once(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    for expected in (1, 0):
        with TestClient(create_app(settings), base_url=BASE):
            printed = capsys.readouterr().out
        assert printed.count("onb_") == expected
        assert printed.count("/signin?token=") == 1


def test_a_new_database_learns_the_key_that_is_there(settings: Settings, key: str, tmp_path: Any) -> None:
    elsewhere = settings.model_copy(update={"database_url": f"sqlite:///{tmp_path / 'other.db'}"})
    with TestClient(create_app(elsewhere), base_url=BASE) as client:
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_link_works_once(browser: TestClient, services: Services, settings: Settings) -> None:
    cookie = browser.cookies.get(SESSION_COOKIE)
    assert cookie
    url = sign_in_url(services.store, ensure_first_key(services.store, settings).owner, BASE)
    first, second = browser.get(url), browser.get(url)
    assert first.status_code == 303
    assert second.status_code == 401
    words = first.headers["set-cookie"].lower()
    assert "httponly" in words
    assert "samesite=strict" in words
    assert "secure" not in words  # plain http on loopback


@pytest.mark.parametrize(("to", "target"), [("/jobs/x", "/jobs/x"), ("//evil.test", "/"), ("https://evil.test", "/")])
def test_a_link_leads_nowhere_else(
    browser: TestClient, services: Services, settings: Settings, to: str, target: str
) -> None:
    url = sign_in_url(services.store, ensure_first_key(services.store, settings).owner, BASE)
    assert browser.get(f"{url}&to={to}").headers["location"] == target


def test_sign_out_ends_the_session(browser: TestClient) -> None:
    cookie = browser.cookies.get(SESSION_COOKIE)
    assert browser.post("/signout", headers={"Origin": BASE}).status_code == 303
    browser.cookies.set(SESSION_COOKIE, cookie or "")
    assert browser.get("/v1/jobs").status_code == 401


@pytest.mark.parametrize(
    ("origin", "status"),
    [(BASE, 202), ("http://evil.test", 403), (None, 403), ("null", 403), ("http://127.0.0.1:9999", 403)],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/signin-links", "/signout"])
def test_unsafe_methods_with_a_cookie_need_our_origin(
    browser: TestClient, path: str, origin: str | None, status: int
) -> None:
    headers = {} if origin is None else {"Origin": origin}
    answer = browser.post(path, json={"example": "llama-3.1-8b"}, headers=headers)
    assert (answer.status_code == 403) is (status == 403), answer.text


def test_a_key_needs_no_origin(client: TestClient) -> None:
    assert client.post("/v1/jobs", json={"example": "llama-3.1-8b"}).status_code == 202


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8040", 200), ("localhost", 200), ("[::1]:8040", 200), ("evil.test", 421), ("", 421), ("a:b:c", 421)],
)
def test_host_allow_list(anonymous: TestClient, host: str, status: int) -> None:
    assert anonymous.get("/healthz", headers={"Host": host}).status_code == status


def test_hosts_can_be_added(settings: Settings) -> None:
    app = create_app(settings.model_copy(update={"allowed_hosts": ["onboard.example"]}))
    with TestClient(app, base_url="http://onboard.example") as client:
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/v1/nothing", "/", "/static/app.css"])
def test_headers_are_on_every_answer(anonymous: TestClient, path: str) -> None:
    headers = anonymous.get(path, headers={"accept": "text/html"}).headers
    assert headers["content-security-policy"] == CSP
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_the_policy_is_the_one_of_the_design() -> None:
    assert CSP == ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'")


def test_another_owners_objects_do_not_exist(client: TestClient, story: Callable[..., Story], other_key: str) -> None:
    job = story().tell()
    digest = client.get(f"/v1/jobs/{job.id}/artifacts").json()[0]["digest"]
    theirs = {"Authorization": f"Bearer {other_key}"}
    base = f"/v1/jobs/{job.id}"
    gets = ["", "/events", "/artifacts", f"/artifacts/{digest}", "/stages/parse", "/logs/parse"]
    for path in gets:
        assert client.get(base + path).status_code == 200
        assert client.get(base + path, headers=theirs).status_code == 404
    for path in ("/cancel", "/retry"):
        assert client.post(base + path, headers=theirs).status_code == 404
    for path in ("", "/pictures/loss.svg"):
        assert client.get(f"/jobs/{job.id}{path}", headers=theirs).status_code == 404
    assert client.get("/v1/jobs", headers=theirs).json()["jobs"] == []
