"""A service of its own for the tests of the whole path."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service of its own, and a client that is signed in."""
    with serving(tmp_path_factory.mktemp("whole"), {}) as client:
        yield client


@contextmanager
def serving(home: Path, more: dict[str, str]) -> Iterator[httpx.Client]:
    """A service with further variables of the environment, and a client that is signed in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ONBOARD_")}
    environment |= {
        "ONBOARD_HOME": str(home / "home"),
        "ONBOARD_PORT": str(port),
        "XDG_CONFIG_HOME": str(home / "config"),
        **more,
    }
    with (home / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.embedded"], env=environment, cwd=home, stdout=log, stderr=log
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    try:
        key_file = home / "config" / "onboard" / "key"
        deadline = time.monotonic() + 90
        while not key_file.exists() or not _ready(client):
            assert process.poll() is None, (home / "serve.log").read_text()
            assert time.monotonic() < deadline, (home / "serve.log").read_text()
            time.sleep(0.2)
        client.headers["Authorization"] = f"Bearer {key_file.read_text().strip()}"
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(20)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
