"""Settings: three URLs, each with an embedded default under the home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onboarding.settings import Settings


def test_the_embedded_defaults_lie_in_the_home(home: Path) -> None:
    settings = Settings()
    assert settings.resolved_database_url() == f"sqlite:///{home}/onboard.db"
    assert settings.resolved_artifacts_url() == f"file://{home}/artifacts"
    assert settings.resolved_broker_url() == f"redis+socket://{home}/broker.sock"


def test_three_urls_replace_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = {
        "DATABASE_URL": "postgresql://db/onboard",
        "BROKER_URL": "redis://broker:6379/0",
        "ARTIFACTS_URL": "s3://bucket/prefix",
    }
    for name, url in urls.items():
        monkeypatch.setenv(f"ONBOARD_{name}", url)
    settings = Settings()
    found = (settings.resolved_database_url(), settings.resolved_broker_url(), settings.resolved_artifacts_url())
    assert found == tuple(urls.values())


def test_a_socket_path_never_gets_too_long_for_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    deep = [Settings(home=tmp_path / name / ("d" * 120)) for name in ("a", "b")]
    sockets = [settings.broker_socket() for settings in deep]
    assert all(len(os.fsencode(path)) <= 107 for path in sockets), "sun_path of unix(7)"
    assert sockets[0] != sockets[1], "each home has its own"
    assert deep[0].broker_socket() == Settings(home=deep[0].home).broker_socket(), "every process finds the same"
