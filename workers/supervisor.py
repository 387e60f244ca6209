"""Runs steps: claims one, watches its process under a lease, records how it ended, hints at what comes next.

The task waits for its child and nothing else, so a pool of threads serves it; it never touches CUDA. Free of torch.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from celery import signals
from celery.exceptions import WorkerShutdown
from sqlalchemy.exc import OperationalError

from onboarding.problem import Problem
from onboarding.records import Step
from onboarding.settings import Settings
from onboarding.store import Store, log_path
from workers.app import ADVANCE, app, send
from workers.environment import OUTCOME_FILE, step_environment
from workers.process import StepHost, StepProcess

log = logging.getLogger(__name__)

POLL_S = 0.1
CHECK_S = 1.0
"""How often memory and cancellation are looked at between heartbeats."""
RECORD_S = 60.0
"""How long the end of a step waits for a database that is busy or away; later the lease is gone anyway."""

stopping = threading.Event()
"""Set when this worker shuts down: running steps are given back at once."""


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]  # celery has no types
def _shut_down(**_: Any) -> None:
    """Runs in the signal handler, in the main thread, which sleeps in the event loop: wake it up by leaving."""
    if not stopping.is_set():
        stopping.set()
        raise WorkerShutdown(0)


@cache
def settings() -> Settings:
    """The settings of this process."""
    return Settings()


@cache
def store() -> Store:
    """The store of this process."""
    return Store(settings().resolved_database_url())


@cache
def host() -> StepHost:
    """The step host of this process."""
    return StepHost(step_environment(settings().cpu_workers))


@app.task(name=ADVANCE)  # type: ignore[untyped-decorator]  # celery has no types
def advance(step_id: int, queue: str) -> None:
    """Run one ready step of the queue, the oldest job's first: a hint says that there is work, not which comes next."""
    owner = f"{os.uname().nodename}:{os.getpid()}:{uuid.uuid4().hex}"
    for candidate in [*(step.id for step in store().ready_steps([queue])), step_id]:
        if stopping.is_set() or candidate is None:
            return
        step = store().claim_step(candidate, owner, settings().lease_s)
        if step is not None:
            for ready in supervise(store(), settings(), step, owner):
                assert ready.id is not None
                send(ready.id, ready.queue)
            return


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a step's process ended."""

    kind: str
    """``outcome`` (the stage said it), ``died``, ``cancelled``, ``limit``, ``stopping`` or ``lost`` (the lease)."""
    reason: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    """For ``outcome`` and ``limit``: state, result, problem."""


def supervise(store: Store, settings: Settings, step: Step, owner: str) -> list[Step]:
    """Run a claimed step to its end and record it.

    Returns:
        Steps that are ready because of it.
    """
    assert step.id is not None
    folder = settings.resolved_home / "scratch" / f"step-{step.id}-{uuid.uuid4().hex[:8]}"
    for old in folder.parent.glob(f"step-{step.id}-*"):  # left by a supervisor that was killed
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    process = host().run(
        step_id=step.id,
        folder=folder,
        log=log_path(settings, step.job_id, step.stage, step.key, step.attempt),
        log_bytes=settings.log_bytes,
    )
    try:
        ending = watch(store, settings, step, owner, process, folder)
    finally:
        process.kill()
    try:
        return record(store, step.id, owner, ending)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(store: Store, settings: Settings, step: Step, owner: str, process: StepProcess, folder: Path) -> Ending:
    """Wait for the process, keeping the lease, until it ends or has to be ended."""
    assert step.id is not None
    started = held = checked = time.monotonic()
    beat_due = started + settings.heartbeat_s
    while (code := process.wait(POLL_S)) is None:
        now = time.monotonic()
        if stopping.is_set():
            return Ending(kind="stopping")
        if now - started > settings.step_wall_s:
            return limit(
                "time-limit", f"{step.stage} ran longer than {settings.step_wall_s:.0f} s", "ONBOARD_STEP_WALL_S"
            )
        try:
            if now >= beat_due:
                beat = store.heartbeat(step.id, owner, settings.lease_s)
                if not beat.held:
                    return Ending(kind="lost")
                held, beat_due = now, now + settings.heartbeat_s
            if now - checked >= CHECK_S:
                checked = now
                used = process.memory_bytes()
                if used > settings.step_memory_bytes:
                    size = f"{used / 2**30:.1f} GiB of {settings.step_memory_bytes / 2**30:.1f} GiB"
                    return limit("memory-limit", f"{step.stage} used {size}", "ONBOARD_STEP_MEMORY_BYTES")
                if store.cancel_requested(step.job_id):
                    return Ending(kind="cancelled")
        except OperationalError as error:
            log.warning("step %s: the database did not answer: %s", step.id, error)
            if now - held > settings.lease_s:
                return Ending(kind="lost")
    return read_outcome(folder, code)


def limit(kind: str, title: str, setting: str) -> Ending:
    """A step that was ended because it took too much."""
    problem = Problem(kind, title, f"{setting} sets the limit.", status=500)
    return Ending(kind="limit", outcome={"state": "failed", "problem": problem.to_dict()})


def read_outcome(folder: Path, code: int) -> Ending:
    """What the process left behind when it exited by itself."""
    try:
        return Ending(kind="outcome", outcome=json.loads((folder / OUTCOME_FILE).read_text()))
    except (OSError, ValueError):
        reason = f"signal {code - 128}" if code > 128 else f"exit status {code}"
        return Ending(kind="died", reason=f"its process ended by {reason} without a result")


def record(store: Store, step_id: int, owner: str, ending: Ending) -> list[Step]:
    """Write the ending down, repeating while the database is away.

    Returns:
        Steps that are ready because of it; none if the lease was lost.
    """
    deadline = time.monotonic() + RECORD_S
    while True:
        try:
            match ending.kind:
                case "outcome" | "limit":
                    return store.finish_step(step_id, owner, **ending.outcome) or []
                case "cancelled":
                    return store.finish_step(step_id, owner, "cancelled") or []
                case "died":
                    return store.step_died(step_id, owner, ending.reason) or []
                case "stopping":
                    store.release_step(step_id, owner)
                    return []
                case _:
                    return []
        except OperationalError:
            if time.monotonic() > deadline or stopping.is_set():
                raise
            time.sleep(0.5)
