"""The production topology on one machine: PostgreSQL, a broker with a password, the commands of the compose file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from toy_service import Toy, free_port, until

from onboarding.pipeline import STAGES
from onboarding.store import Store
from workers.broker import broker_binary

WORKER = ("workers.run", "--queues", "cpu,gpu,multi")
API = ("uvicorn", "api.app:create_app", "--factory", "--host", "127.0.0.1", "--port")


@pytest.fixture
def broker_url() -> Iterator[str]:
    """A server on TCP with a password."""
    port = free_port()
    command = [broker_binary(), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", "secret", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    yield f"redis://:secret@127.0.0.1:{port}/0"
    server.terminate()
    server.wait()


@pytest.fixture
def production(toy: Toy, postgres_url: str, broker_url: str, tmp_path: Path) -> Iterator[Toy]:
    """The toy home on three URLs."""
    toy.environment |= {
        "ONBOARD_DATABASE_URL": postgres_url,
        "ONBOARD_BROKER_URL": broker_url,
        "ONBOARD_ARTIFACTS_URL": (tmp_path / "shared-artifacts").as_uri(),
    }
    store = Store(postgres_url)
    store.migrate()
    moved = replace(toy, store=store)  # shares the list of started processes
    yield moved
    for process in toy.started:
        process.kill()
        process.wait()
    store.close()


def run_job(toy: Toy, seconds: float) -> None:
    """Two workers and an API; a job submitted over REST runs to its end."""
    workers = [toy.start(*WORKER) for _ in range(2)]
    toy.start(*API, toy.environment["ONBOARD_PORT"])
    url = f"http://127.0.0.1:{toy.environment['ONBOARD_PORT']}"
    until(lambda: answers(url), 60, "the API answers")
    key = (Path(toy.environment["XDG_CONFIG_HOME"]) / "onboard" / "key").read_text().strip()
    headers = {"Authorization": f"Bearer {key}"}
    body = {"example": "kimi-linear", "options": {"profile": "quick", "device": "cpu"}}
    answer = httpx.post(f"{url}/v1/jobs", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    job = toy.store.get_job(answer.json()["id"])
    assert job is not None
    until(lambda: toy.state(job) in ("succeeded", "failed"), seconds, "the job has ended")
    assert toy.state(job) == "succeeded", toy.store.get_job(job.id)
    steps = toy.store.steps(job.id)
    assert {step.stage for step in steps} == {stage.name for stage in STAGES}
    assert {(step.attempt, step.takeovers) for step in steps} == {(1, 0)}
    for worker in workers:
        worker.terminate()
        assert worker.wait(5) == 0


def answers(url: str) -> bool:
    """Whether the API is ready for work."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.postgres
def test_toy_stages_on_postgres_and_redis(production: Toy) -> None:
    run_job(production, 60)
    ran = [line.split()[0] for line in production.runs("start")]
    assert len(ran) == len(set(ran)) == 13, "two workers ran each step once"
    assert not (production.home / "broker.sock").exists()


@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_path_on_postgres_and_redis(production: Toy) -> None:
    del production.environment["ONBOARD_STAGES_PACKAGE"]
    run_job(production, 1000)
