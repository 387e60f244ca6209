"""One step under its supervisor: what it leaves, how it is ended, and what is said of it. No broker, no service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from toy_service import Toy, until

from onboarding.records import Job, Step
from onboarding.settings import Settings
from onboarding.store import log_path
from workers import supervisor
from workers.process import StepHost

OWNER = "me"


@pytest.fixture
def settings(toy: Toy) -> Settings:
    """The toy home's settings, with a quick heartbeat."""
    return Settings(home=toy.home, heartbeat_s=0.3, lease_s=2.0)


@pytest.fixture(autouse=True)
def host(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepHost]:
    """A step host with the toy stages."""
    host = StepHost(toy.environment)
    monkeypatch.setattr(supervisor, "host", lambda: host)
    monkeypatch.setattr(supervisor, "stopping", threading.Event())
    yield host
    host.close()


def claim(toy: Toy, settings: Settings) -> tuple[Job, Step]:
    job = toy.submit()
    step_id = toy.step(job, "intake").id
    assert step_id is not None
    step = toy.store.claim_step(step_id, OWNER, settings.lease_s)
    assert step is not None
    return job, step


def supervise(toy: Toy, settings: Settings) -> tuple[Job, list[Step]]:
    """Run the first step of a new job to its end."""
    job, step = claim(toy, settings)
    return job, supervisor.supervise(toy.store, settings, step, OWNER)


def write_stage(toy: Toy, body: str) -> None:
    """Replace the first stage."""
    path = toy.home.parent / "toys" / "toy_stages" / "intake" / "stage.py"
    path.write_text("import os, sys, time\nfrom onboarding.context import StageResult\n" + body)


def problem(toy: Toy, job: Job) -> dict[str, Any]:
    """Why the job failed."""
    step = toy.step(job, "intake")
    assert step.state == "failed"
    assert step.problem is not None
    return step.problem


def test_a_step_leaves_result_events_artifact_and_log(toy: Toy, settings: Settings) -> None:
    write_stage(
        toy,
        "def run(c):\n"
        "    print('to the log', c.scratch.is_dir(), list(c.scratch.iterdir()))\n"
        "    c.metric('loss', 1, float('nan'))\n"
        "    c.save('a.txt', b'hello', 'text/plain')\n"
        "    return StageResult(summary=f'{c.job_name} {c.definition[:2]} {c.input}')\n",
    )
    job, ready = supervise(toy, settings)
    assert [step.stage for step in ready] == ["parse"]
    assert toy.store.load_result(job.id, "intake") == {"outcome": "ok", "summary": "toy 00 {}"}
    assert [(a.stage, a.name, a.size) for a in toy.store.artifacts(job.id)] == [("intake", "a.txt", 5)]
    assert [event.data["value"] for event in toy.store.metrics(job.id, "intake")] == ["NaN"]
    log = log_path(settings, job.id, "intake", "", 1).read_text().splitlines()
    assert "to the log True []" in log, "the scratch folder is there and empty"
    # what the stage reports is told as lines that begin with the time
    assert [line.split(" ", 1)[1] for line in log if line != "to the log True []"] == [
        "intake begins, attempt 1",
        "loss  step 1  nan",
        "stored a.txt  5 bytes  sha256 2cf24dba5fb0a30e",
        "toy 00 {}",
    ]
    assert list((toy.home / "scratch").iterdir()) == []


def test_a_crash_is_told_in_words_and_its_traceback_is_in_the_log(toy: Toy, settings: Settings) -> None:
    write_stage(toy, "def run(c):\n    c.progress(1, 2)\n    return {}['absent']\n")
    job, ready = supervise(toy, settings)
    assert ready == []
    assert toy.state(job) == "failed"
    told = problem(toy, job)
    assert told["title"] == "intake failed: KeyError: 'absent'"
    assert f"logs/{job.id}/intake-1.log" in told["detail"]
    assert "Traceback" not in str(told)
    assert "return {}['absent']" in log_path(settings, job.id, "intake", "", 1).read_text()
    assert toy.store.latest_progress(job.id)["intake", ""]["done"] == 1, "events before the crash are kept"


def test_a_skipped_stage_keeps_its_reason(toy: Toy, settings: Settings) -> None:
    write_stage(
        toy, "from onboarding.problem import StageSkipped\ndef run(c):\n    raise StageSkipped('no GPU here')\n"
    )
    job, _ = supervise(toy, settings)
    step = toy.step(job, "intake")
    assert (step.state, step.result) == ("skipped", {"outcome": "skipped", "summary": "no GPU here"})


def test_a_step_that_dies_is_ready_again_as_the_same_attempt(toy: Toy, settings: Settings) -> None:
    write_stage(toy, "def run(c):\n    os._exit(3)\n")
    job, ready = supervise(toy, settings)
    assert [(step.stage, step.attempt, step.takeovers) for step in ready] == [("intake", 1, 1)]
    reasons = [e.data.get("reason") for e in toy.store.events_since(job.id) if e.kind == "step"]
    assert "its process ended by exit status 3 without a result" in reasons


@pytest.mark.parametrize(
    ("limits", "kind"),
    [({"step_wall_s": 1.0}, "time-limit"), ({"step_memory_bytes": 150 * 2**20}, "memory-limit")],
)
def test_limits_end_a_step_with_all_that_it_started(
    toy: Toy, settings: Settings, limits: dict[str, float], kind: str
) -> None:
    write_stage(
        toy,
        "import subprocess\n"
        "def run(c):\n"
        "    subprocess.Popen([sys.executable, '-c', 'x = bytearray(200 << 20); import time; time.sleep(600)'],\n"
        "                     start_new_session=True)\n"
        "    time.sleep(600)\n",
    )
    job, _ = supervise(toy, settings.model_copy(update=limits))
    assert problem(toy, job)["type"].endswith(f"/{kind}")
    assert not [p for p in toy.processes() if "time.sleep" in " ".join(p.cmdline())]


def test_cancelling_ends_a_running_step(toy: Toy, settings: Settings) -> None:
    toy.hold("intake")
    job, step = claim(toy, settings)
    thread = threading.Thread(target=supervisor.supervise, args=(toy.store, settings, step, OWNER))
    thread.start()
    until(lambda: toy.runs("start"), 30, "the step runs")
    toy.store.request_cancel(job.id)
    thread.join(5)
    assert not thread.is_alive()
    assert toy.state(job) == "cancelled"
    assert toy.step(job, "intake").state == "cancelled"


def test_a_lost_lease_ends_the_step_and_writes_nothing(toy: Toy, settings: Settings) -> None:
    toy.hold("intake")
    job, step = claim(toy, settings.model_copy(update={"lease_s": -1.0}))
    toy.store.take_over_expired()
    assert supervisor.supervise(toy.store, settings, step, OWNER) == []
    assert toy.step(job, "intake").state == "ready"


def test_a_log_is_capped(toy: Toy, settings: Settings) -> None:
    write_stage(toy, "def run(c):\n    print('x' * 10**6)\n    return StageResult()\n")
    job, _ = supervise(toy, settings.model_copy(update={"log_bytes": 1000}))
    text = log_path(settings, job.id, "intake", "", 1).read_text()
    kept, _, notice = text.partition("\n[")
    assert notice == "the log reached its limit; the rest is not kept]\n"
    assert len(kept) == 1000
    assert kept.endswith("x" * 900)


def test_tracing_variables_never_reach_a_step(toy: Toy, settings: Settings, host: StepHost) -> None:
    host.environment["LANGSMITH_API_KEY"] = "secret"
    host.environment["LANGCHAIN_TRACING_V2"] = "true"
    write_stage(
        toy,
        "def run(c):\n    return StageResult(summary=str([n for n in os.environ if n[:5] in ('LANGS', 'LANGC')]))\n",
    )
    job, _ = supervise(toy, settings)
    assert (toy.store.load_result(job.id, "intake") or {})["summary"] == "[]"


def test_a_dead_host_is_replaced(toy: Toy, settings: Settings, host: StepHost) -> None:
    supervise(toy, settings)
    [parent] = [p for p in toy.processes() if "workers.host" in p.cmdline()]
    parent.kill()
    psutil.wait_procs([parent], timeout=5)
    job, ready = supervise(toy, settings)
    assert [step.stage for step in ready] == ["parse"]
    assert toy.step(job, "intake").takeovers == 0


GPU_HOST = """
import sys
from pathlib import Path
from workers import host
host.GPU_DEVICE = Path("/dev/null")  # as if there were one
host.main(int(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_with_a_gpu_each_step_is_a_fresh_interpreter(
    toy: Toy, settings: Settings, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (toy.home.parent / "toys" / "gpu_host.py").write_text(GPU_HOST)
    host = StepHost(toy.environment, "gpu_host" if gpu else "workers.host")
    monkeypatch.setattr(supervisor, "host", lambda: host)
    write_stage(toy, "def run(c):\n    return StageResult(summary=sys.modules['__main__'].__spec__.name)\n")
    job, _ = supervise(toy, settings)
    expected = "workers.step_main" if gpu else "workers.host"
    assert (toy.store.load_result(job.id, "intake") or {})["summary"] == expected
    host.close()
