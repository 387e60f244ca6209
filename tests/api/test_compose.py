"""docker-compose.yml against the compose specification's structure, and its commands against what really starts.

No container engine is needed. The rules are those of https://github.com/compose-spec/compose-spec/blob/main/spec.md for
the elements that the file uses; an element that is not listed here is a fault until somebody adds it with its rule.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from onboarding.pipeline import QUEUES
from onboarding.settings import Settings
from workers import embedded, run

FILE = Path(__file__).parents[2] / "docker-compose.yml"
TOP = {"services", "volumes", "networks", "secrets", "configs", "name"}
SERVICE: dict[str, tuple[type, ...]] = {
    "image": (str,),
    "command": (str, list),
    "working_dir": (str,),
    "volumes": (list,),
    "environment": (dict, list),
    "restart": (str,),
    "stop_grace_period": (str,),
    "ports": (list,),
    "depends_on": (dict, list),
    "healthcheck": (dict,),
    "profiles": (list,),
    "deploy": (dict,),
}
HEALTHCHECK = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
DURATION = re.compile(r"(\d+(h|m|s|ms|us))+")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, with YAML's merges resolved."""
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_structure(compose: dict[str, Any]) -> None:
    assert {key for key in compose if not key.startswith("x-")} <= TOP
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
        assert "image" in service
        for key, value in service.items():
            assert isinstance(value, SERVICE[key]), (name, key)
        assert service.get("restart", "no") in {"no", "always", "on-failure", "unless-stopped"}
        assert DURATION.fullmatch(service.get("stop_grace_period", "1s"))
        for value in service.get("environment", {}).values():
            assert isinstance(value, str | int | float | None)


def test_health_checks(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        check = service.get("healthcheck")
        if check is not None:
            assert set(check) <= HEALTHCHECK
            assert check["test"][0] in {"CMD", "CMD-SHELL", "NONE"}
            assert all(DURATION.fullmatch(check[key]) for key in ("interval", "timeout"))
            assert isinstance(check["retries"], int)


def test_references_hold(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, name
            assert how["condition"] in CONDITIONS
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other]
            assert not services[other].get("profiles"), "what others need must always be there"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith(".") or source in compose["volumes"], volume


def test_no_secret_is_in_the_file(compose: dict[str, Any]) -> None:
    text = FILE.read_text()
    for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "ONBOARD_API_KEY"):
        for use in re.findall(rf"\$\{{{name}[^}}]*\}}", text):
            assert use.startswith(f"${{{name}:?"), "compose must stop when it is missing"
    for service in compose["services"].values():
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key or "KEY" in key or "://" in str(value):
                assert not re.search(r"://[^$/]*:[^$@/]+@", str(value)), key
                assert "PASSWORD" not in key or str(value).startswith("${")


def test_only_the_api_is_reachable_and_only_from_here(compose: dict[str, Any]) -> None:
    published = {name: s["ports"] for name, s in compose["services"].items() if "ports" in s}
    assert published == {"api": ["127.0.0.1:8040:8040"]}


def test_the_commands_are_those_that_the_embedded_service_runs(compose: dict[str, Any]) -> None:
    source = inspect.getsource(embedded.Service.__init__)
    api = compose["services"]["api"]["command"]
    assert api[:2] == ["python", "-m"]
    for word in api[1:]:
        assert f'"{word}"' in source or word in ("0.0.0.0", "8040"), word
    assert '"-m", "workers.run"' in source
    queues: list[str] = []
    for name in ("worker", "worker-gpu"):
        command = compose["services"][name]["command"]
        assert command[:4] == ["python", "-m", "workers.run", "--queues"]
        assert f"--queues={command[4]}" in run.worker_arguments(command[4], 1)
        queues += command[4].split(",")
    assert sorted(queues) == sorted(QUEUES)  # every queue is served, once


def test_the_environment_is_understood(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = compose["services"]["api"]["environment"]
    fields = {f"ONBOARD_{name.upper()}" for name in Settings.model_fields}
    for key, value in environment.items():
        if key.startswith("ONBOARD_"):
            assert key in fields
            monkeypatch.setenv(key, re.sub(r"\$\{\w+:-([^}]*)\}|\$\{(\w+):\?[^}]*\}", r"\1\2", value))
    settings = Settings()
    assert settings.resolved_database_url().startswith("postgresql+psycopg://onboard:")
    assert settings.resolved_artifacts_url() == "file:///var/lib/onboard/artifacts"
    assert settings.base_url() == "http://127.0.0.1:8040"
