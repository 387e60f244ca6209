"""The whole pipeline survives ``kill -9`` of each kind of process in every stage. Slow: a whole job each."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from toy_service import Toy, alive, parent, until

from onboarding.pipeline import STAGES
from onboarding.records import Event, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RESUME_S = 15
GONE_S = 2
STAGE_S = 600
FINISHED = ("succeeded", "skipped")


class Watched:
    """A job and everything that has been said of it."""

    def __init__(self, toy: Toy, job: Job) -> None:
        self.toy, self.job = toy, job
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """All events so far."""
        while new := self.toy.store.events_since(self.job.id, len(self.events)):
            self.events += new
        return self.events

    def running(self) -> int:
        """How many times a step has been started."""
        return sum(e.kind == "step" and e.data["state"] == "running" for e in self.read())

    def reached(self, stage: str) -> bool:
        """Whether a step of the stage has started, or the job has failed."""
        return any(
            (e.kind == "step" and e.stage == stage and e.data["state"] == "running")
            or (e.kind == "job" and e.data["state"] == "failed")
            for e in self.read()
        )

    def goes_on(self, before: int) -> bool:
        """Whether more than so many steps have been started, or the job has ended."""
        return self.running() > before or self.ended()

    def ended(self) -> bool:
        """Whether the job has come to its end."""
        return self.toy.state(self.job) in ("succeeded", "failed", "cancelled")


def start(toy: Toy) -> psutil.Process:
    """Start the service."""
    before = toy.logs().count("onboard serve: http")
    process = toy.start("workers.embedded")
    until(lambda: toy.logs().count("onboard serve: http") > before, 60, "ready")
    return psutil.Process(process.pid)


def submit(toy: Toy) -> Job:
    """A quick job of the published definition, over REST."""
    key = (Path(toy.environment["XDG_CONFIG_HOME"]) / "onboard" / "key").read_text().strip()
    answer = httpx.post(
        f"http://127.0.0.1:{toy.environment['ONBOARD_PORT']}/v1/jobs",
        json={"example": "kimi-linear", "options": {"profile": "quick", "device": "cpu"}},
        headers={"Authorization": f"Bearer {key}"},
    )
    assert answer.status_code == 202, answer.text
    job = toy.store.get_job(answer.json()["id"])
    assert job is not None
    return job


def step_processes(toy: Toy) -> list[psutil.Process]:
    """What the step host has below it: guards, steps, and what those started."""
    hosts = [p for p in toy.processes() if "workers.host" in p.cmdline() and "workers.run" in parent(p).cmdline()]
    return [below for host in hosts for below in host.children(recursive=True)]


def kill(toy: Toy, service: psutil.Process, victim: str) -> psutil.Process:
    """Kill one process, check what must end with it, and return the service that runs then."""
    tree = step_processes(toy)
    match victim:
        case "step":
            for process in tree[1:2]:  # the first is its guard
                process.kill()
        case "worker":
            toy.process("workers.run").kill()
        case "broker":
            toy.process("valkey-server").kill()
        case "service":
            service.kill()
    if victim in ("worker", "service"):
        until(lambda: not any(map(alive, tree)), GONE_S, f"the step ends with its worker: {tree}")
    if victim == "service":
        until(lambda: not toy.processes(), GONE_S, "everything ends with the service")
        return start(toy)
    return service


@pytest.mark.parametrize("victim", ["step", "worker", "broker", "service"])
def test_a_real_job_survives_a_death_in_every_stage(toy: Toy, victim: str) -> None:
    del toy.environment["ONBOARD_STAGES_PACKAGE"]
    service = start(toy)
    watched = Watched(toy, submit(toy))
    for stage in STAGES:
        until(partial(watched.reached, stage.name), STAGE_S, f"{stage.name} starts")
        if watched.ended():
            break
        before = watched.running()
        service = kill(toy, service, victim)
        killed = time.monotonic()
        until(partial(watched.goes_on, before), STAGE_S, "the job goes on")
        if victim != "broker":  # with the broker the step that ran goes on, and may take its time
            assert time.monotonic() - killed <= RESUME_S, f"{stage.name} resumed late"

    until(watched.ended, STAGE_S, "the job ends")
    assert toy.state(watched.job) == "succeeded", toy.store.get_job(watched.job.id)
    finished = Counter((e.stage, e.key) for e in watched.read() if e.kind == "step" and e.data["state"] in FINISHED)
    assert set(finished.values()) == {1}, "every step has finished once"
    assert {step.attempt for step in toy.store.steps(watched.job.id)} == {1}
    for step in finished:
        states = [e.data["state"] for e in watched.events if e.kind == "step" and (e.stage, e.key) == step]
        assert states[-1] in FINISHED, "nothing is run after it has finished"
