"""The embedded service with toy stages: a job runs through, and survives the death of any of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from toy_service import Toy, alive, parent, until

from onboarding.records import Job

EVERY_STEP = sorted(
    ["intake", "parse", "gaps", "align", "throughput", "scale", "package"]
    + [f"{stage}-{key}" for stage in ("generate", "judge", "tune") for key in ("aa", "bb")]
)
RESUME_S = 15
GONE_S = 2


def serve(toy: Toy) -> psutil.Process:
    """Start the service and wait until it says that it is ready."""
    before = toy.logs().count("onboard serve: http")
    process = toy.start("workers.embedded")
    until(lambda: toy.logs().count("onboard serve: http") > before or process.poll() is not None, 60, "ready")
    assert process.poll() is None, toy.logs()
    return psutil.Process(process.pid)


def reaches(toy: Toy, job: Job, name: str, times: int = 1) -> None:
    """Wait until a stage runs, for the n-th time."""
    stage, _, key = name.partition("-")

    until(lambda: [line.split()[0] for line in toy.runs("start")].count(name) >= times, RESUME_S, f"{name} runs")
    assert toy.step(job, stage, key).state == "running"


def step_process(toy: Toy, name: str) -> psutil.Process:
    """The process that runs a stage now."""
    starts = [line.split() for line in (toy.control / "runs").read_text().splitlines() if line.startswith("start")]
    return psutil.Process(int([line[3] for line in starts if line[1] == name][-1]))


def test_a_job_survives_the_death_of_every_process(toy: Toy) -> None:
    toy.environment |= {"ONBOARD_LEASE_S": "4", "ONBOARD_HEARTBEAT_S": "1", "ONBOARD_SWEEP_S": "1"}
    die_one_by_one(toy)


@pytest.mark.slow
def test_a_job_survives_with_the_default_lease(toy: Toy) -> None:
    die_one_by_one(toy)


def die_one_by_one(toy: Toy) -> None:
    """Kill each kind of process while a step runs; the step is run again, and nothing else is."""
    for name in ("intake", "parse", "gaps", "tune-bb", "align", "package"):
        toy.hold(name)
    service = serve(toy)
    job = toy.submit()

    reaches(toy, job, "intake")
    step_process(toy, "intake").kill()
    reaches(toy, job, "intake", 2)
    toy.release("intake")

    reaches(toy, job, "parse")
    held = step_process(toy, "parse")
    toy.process("workers.run").kill()
    until(lambda: not alive(held), GONE_S, "the step's process ends with its worker")
    reaches(toy, job, "parse", 2)
    toy.release("parse")

    reaches(toy, job, "gaps")
    toy.process("valkey-server").kill()
    toy.release("gaps")

    reaches(toy, job, "tune-bb")
    parent(parent(step_process(toy, "tune-bb"))).kill()  # the step host: the step goes on
    toy.release("tune-bb")

    reaches(toy, job, "align")
    parent(step_process(toy, "align")).kill()  # its guard
    reaches(toy, job, "align", 2)
    toy.release("align")

    reaches(toy, job, "package")
    service.kill()
    until(lambda: not toy.processes(), GONE_S, "everything ends with the service")
    service = serve(toy)
    reaches(toy, job, "package", 2)
    toy.release("package")
    until(lambda: toy.state(job) == "succeeded", 30, "the job has succeeded")

    ended = [line.split()[0] for line in toy.runs("end")]
    assert sorted(ended) == EVERY_STEP, "every step has finished once"
    starts = [line.split()[0] for line in toy.runs("start")]
    twice = {name for name in starts if starts.count(name) > 1}
    assert twice == {"intake", "parse", "align", "package"}, "only what was killed was run again"
    assert {(s.attempt, s.state) for s in toy.store.steps(job.id)} == {(1, "succeeded")}
    seqs = [event.seq for event in toy.store.events_since(job.id, 0, 10_000)]
    assert seqs == list(range(1, len(seqs) + 1))

    service.send_signal(signal.SIGTERM)
    until(lambda: not toy.processes(), GONE_S, "everything ends with the service")


def test_one_service_a_home_that_gives_running_steps_back_when_it_stops(toy: Toy) -> None:
    """On a home whose path is too long for a socket."""
    toy.move(toy.home / ("d" * 80) / ("e" * 80))
    toy.hold("intake")
    service = serve(toy)
    assert not (toy.home / "broker.sock").exists()
    second = subprocess.run(
        [sys.executable, "-m", "workers.embedded"], env=toy.environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert second.stderr == f"onboard serve: onboard serve already runs on {toy.home} (process {service.pid})\n"

    job = toy.submit()
    reaches(toy, job, "intake")
    os.kill(service.pid, signal.SIGINT)
    until(lambda: not toy.processes(), GONE_S, "everything ends with the service")
    assert toy.step(job, "intake").state == "ready"
    assert toy.step(job, "intake").takeovers == 0


def test_a_port_in_use_stops_the_start_with_the_reason(toy: Toy) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(toy.environment["ONBOARD_PORT"])))
        taken.listen()
        answer = subprocess.run(
            [sys.executable, "-m", "workers.embedded"], env=toy.environment, capture_output=True, text=True, check=False
        )
    assert answer.returncode == 1
    port = toy.environment["ONBOARD_PORT"]
    refusal = f"cannot listen on 127.0.0.1 port {port} (Address already in use); set ONBOARD_PORT"
    assert answer.stderr == f"onboard serve: {refusal}\n"
    until(lambda: not toy.processes(), GONE_S, "nothing is left")
