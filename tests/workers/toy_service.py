"""Toy stages that write down when they run and can be held, and the service that runs them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from onboarding.records import Job, Step
from onboarding.settings import Settings
from onboarding.store import Store

TOY = """
import os, subprocess, sys, time
from pathlib import Path
from onboarding.context import StageContext, StageResult

class Result(StageResult):
    gaps: list[str] = []

def run(context: StageContext) -> Result:
    control = Path(os.environ["TOY_CONTROL"])
    name = "-".join(part for part in (context.stage, context.key) if part)
    # A child of the step, in a session of its own: it must not outlive the step either.
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    with (control / "runs").open("a") as runs:
        runs.write(f"start {name} {context.attempt} {os.getpid()}\\n")
    for done in range(3):
        context.progress(done, 3, f"{name} {done}")
    deadline = time.monotonic() + 120
    while (control / f"hold-{name}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if (control / f"fail-{name}").exists():
        raise ValueError("told to fail")
    context.save(f"{name}.txt", name.encode(), "text/plain")
    child.kill()
    child.wait()
    with (control / "runs").open("a") as runs:
        runs.write(f"end {name} {context.attempt} {os.getpid()}\\n")
    return Result(summary=f"{name} done", gaps=["aa", "bb"] if context.stage == "gaps" else [])
"""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def parent(process: psutil.Process) -> psutil.Process:
    """The process that started another."""
    found = process.parent()
    assert found is not None
    return found


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Toy:
    """A home whose steps come from the toy stages, and the processes started on it."""

    home: Path
    control: Path
    environment: dict[str, str]
    store: Store
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *module: str) -> subprocess.Popen[bytes]:
        """Start ``python -m module ...`` on this home."""
        log = (self.control.parent / "serve.log").open("ab")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module], env=self.environment, stdout=log, stderr=log, cwd=self.home
            )
        self.started.append(process)
        return process

    def move(self, home: Path) -> None:
        """Use another home."""
        self.store.close()
        self.home = home
        self.environment["ONBOARD_HOME"] = str(home)
        self.store = Store(Settings(home=home).resolved_database_url())
        self.store.migrate()

    def submit(self) -> Job:
        """A new job; its hint is left to the sweeper."""
        return self.store.create_job(name="toy", model_type="toy", owner="me", definition="0" * 64)

    def runs(self, kind: str) -> list[str]:
        """``name attempt`` of each start or end so far."""
        path = self.control / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [" ".join(line.split()[1:3]) for line in lines if line.startswith(kind)]

    def hold(self, name: str) -> None:
        """Keep a stage from ending."""
        (self.control / f"hold-{name}").touch()

    def release(self, name: str) -> None:
        """Let it end."""
        (self.control / f"hold-{name}").unlink()

    def step(self, job: Job, stage: str, key: str = "") -> Step:
        """The newest step of a stage."""
        return [s for s in self.store.steps(job.id) if (s.stage, s.key) == (stage, key)][-1]

    def state(self, job: Job) -> str:
        """The job's state."""
        found = self.store.get_job(job.id)
        assert found is not None
        return found.state

    def processes(self) -> list[psutil.Process]:
        """All living processes that were started on this home, however deep."""
        marker = str(self.control)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                # The broker writes its title over its environment; the title names the socket.
                ours = process.environ().get("TOY_CONTROL") == marker or f"{self.home}/" in " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def process(self, *words: str) -> psutil.Process:
        """The one process on this home whose command line holds all the words."""
        found = [p for p in self.processes() if all(any(w in part for part in p.cmdline()) for w in words)]
        assert len(found) == 1, (words, [p.cmdline() for p in found])
        return found[0]

    def logs(self) -> str:
        """What the service has said, for failure messages."""
        files = [self.control.parent / "serve.log", *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in files if path.exists())
