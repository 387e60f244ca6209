"""A service on a fresh home, a client with its key, and jobs told step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.app import create_app
from api.auth import ensure_first_key
from api.deps import Services
from onboarding.settings import Settings
from tests.api.story import Story

BASE = "http://127.0.0.1:8040"


@pytest.fixture
def settings(home: Path) -> Settings:
    """Settings of a fresh home."""
    return Settings()


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    """The application."""
    return create_app(settings)


@pytest.fixture
def anonymous(app: FastAPI) -> Iterator[TestClient]:
    """A client without credentials."""
    with TestClient(app, base_url=BASE, raise_server_exceptions=False, follow_redirects=False) as client:
        yield client


@pytest.fixture
def services(app: FastAPI) -> Services:
    """What the application holds."""
    found: Services = app.state.services
    return found


@pytest.fixture
def key(anonymous: TestClient, settings: Settings) -> str:
    """The first key, as the command line finds it."""
    return settings.key_file.read_text().strip()


@pytest.fixture
def client(anonymous: TestClient, key: str) -> TestClient:
    """A client with the first key."""
    anonymous.headers["Authorization"] = f"Bearer {key}"
    return anonymous


@pytest.fixture
def story(services: Services, key: str, settings: Settings) -> Callable[..., Story]:
    """Makes a job of the first key's owner."""
    owner = ensure_first_key(services.store, settings).owner

    def make(name: str = "kimi-linear") -> Story:
        return Story(services.store, services.artifacts, settings, owner, name)

    return make


@pytest.fixture
def other_key(services: Services, key: str) -> str:
    """A second owner's key."""
    return services.store.create_key("other")[1]
