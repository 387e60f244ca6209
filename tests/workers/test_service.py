"""The embedded service with toy stages: a job runs through, and survives the death of any of its processes."""

from __future__ import annotations

import signal
import time

import psutil
from toy_service import Toy, until

EVERY_STEP = sorted(
    ["intake", "parse", "gaps", "align", "package"]
    + [f"{stage}-{key}" for stage in ("generate", "judge", "tune") for key in ("aa", "bb")]
)


def serve(toy: Toy) -> psutil.Process:
    """Start the service and wait until it says that it is ready."""
    before = toy.logs().count("onboard serve: http")
    process = toy.start("workers.embedded")
    until(lambda: toy.logs().count("onboard serve: http") > before or process.poll() is not None, 60, "ready")
    assert process.poll() is None, toy.logs()
    return psutil.Process(process.pid)


def finish(toy: Toy, job: object) -> None:
    until(lambda: toy.state(job) != "running", 60, "the job has ended")


def test_a_job_runs_through(toy: Toy) -> None:
    service = serve(toy)
    job = toy.submit()
    until(lambda: toy.state(job) == "succeeded", 60, "the job has succeeded")
    assert sorted(line.split()[0] for line in toy.runs("end")) == EVERY_STEP
    service.send_signal(signal.SIGTERM)
    stopped = time.monotonic()
    until(lambda: not toy.processes(), 2, "all processes have ended")
    print("stopped in", time.monotonic() - stopped)
