"""The step host: a process that has imported what steps need and forks one process per step.

Importing torch, transformers and the graph library takes 4 s of processor time; with 20 and more steps a job that would
be most of the time of a small one. The host imports them once. On a machine with an NVIDIA GPU nothing is imported
beforehand and each step is a fresh interpreter: CUDA must not be touched before a fork, and no list of imports can
promise that.

Usage: ``python -m workers.host CONTROL_FD PARENT_PID``. Requests come over the control socket, one message each: JSON
with two descriptors, the lifeline and the status pipe, on which the guard says its process id and the exit status.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from onboarding.artifacts import ArtifactStore
from onboarding.sandbox import warm
from onboarding.settings import Settings
from onboarding.store import Store
from workers.environment import STEP_MARK, clean_environment
from workers.guard import PR_SET_PDEATHSIG, guard

HEAVY = ("torch", "transformers.models.auto.modeling_auto", "agents.kernel_search")
"""Imported beforehand. Not triton: whether it interprets is decided while it is imported, by the step."""
GPU_DEVICE = Path("/dev/nvidiactl")
MESSAGE_BYTES = 65536


def main(control_fd: int, parent: int) -> None:
    """Serve requests until the supervisor closes the socket or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    clean_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards report by their pipe and need no burial
    forking = not GPU_DEVICE.exists()
    if forking:
        warm.prestart()  # steps inherit it: their confined programs are forked from it
        preload()
    with socket.socket(fileno=control_fd) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                run_guard(json.loads(message), *descriptors, forking=forking)
            for descriptor in descriptors:
                os.close(descriptor)


def preload() -> None:
    """Import what steps import; a package that is missing or broken is the step's to report."""
    settings = Settings()
    custom = settings.stages_package != Settings.model_fields["stages_package"].default
    for name in ("workers.step_main", *(() if custom else HEAVY)):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    # Drivers are imported when a store is made; these two stores open nothing.
    Store(settings.resolved_database_url()).close()
    ArtifactStore(settings.resolved_artifacts_url())
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page it shares with the forks


def run_guard(request: dict[str, Any], lifeline: int, status: int, *, forking: bool) -> NoReturn:
    """Be the guard of one step."""
    code = 1
    try:
        os.setsid()
        os.write(status, f"{os.getpid()}\n".encode())
        step_id, folder = int(request["step_id"]), str(request["folder"])
        os.environ[STEP_MARK] = folder
        code = guard(
            partial(run_here if forking else run_afresh, step_id, folder),
            lifeline=lifeline,
            private=(status,),
            log_path=request["log"],
            log_bytes=request["log_bytes"],
        )
        os.write(status, f"{code}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_here(step_id: int, folder: str) -> None:
    """Run the step in this fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # every fork would draw the same numbers
    importlib.import_module("workers.step_main").main(step_id, Path(folder))


def run_afresh(step_id: int, folder: str) -> None:
    """Become a fresh interpreter that runs the step."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers.step_main", str(step_id), folder])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
