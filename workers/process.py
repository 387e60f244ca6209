"""A step's process tree as its supervisor sees it: start it behind a guard, look at its memory, end it whole."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from workers.environment import STEP_MARK

KILL_S = 5.0
"""A guard that has not cleared its tree by then is killed itself."""


class StepHost:
    """The client of ``workers.host``: started when first needed, and again when it has died.

    Args:
        environment: the environment of the host and of its steps.
        module: the host's module.
    """

    def __init__(self, environment: dict[str, str], module: str = "workers.host") -> None:
        self.environment = environment
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the host now, so that it is warm when the first step comes."""
        with self._lock:
            self._connected()

    def close(self) -> None:
        """End the host; steps that run are not touched."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def run(self, *, step_id: int, folder: Path, log: Path, log_bytes: int) -> StepProcess:
        """Run a step in a process of its own.

        Args:
            step_id: the step.
            folder: where it leaves its outcome.
            log: file that takes its output.
            log_bytes: size at which the log is capped.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        request = {"step_id": step_id, "folder": str(folder), "log": str(log), "log_bytes": log_bytes}
        their_lifeline, lifeline = os.pipe()  # our ends are never inherited
        status, their_status = os.pipe()
        try:
            with self._lock:
                try:
                    self._send(request, their_lifeline, their_status)
                except OSError:  # it died since it was last used
                    self._send(request, their_lifeline, their_status)
        except BaseException:
            os.close(lifeline)
            os.close(status)
            raise
        finally:
            os.close(their_lifeline)
            os.close(their_status)
        return StepProcess(lifeline, status, str(folder))

    def _send(self, request: dict[str, object], *descriptors: int) -> None:
        socket.send_fds(self._connected(), [json.dumps(request).encode()], descriptors)

    def _connected(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return self._control
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self._control


class StepProcess:
    """One step's process tree, seen through its guard.

    Args:
        lifeline: write end of the pipe that keeps the tree alive.
        status: read end of the pipe on which the guard says its process id, then the step's exit status.
        mark: value of ``STEP_MARK`` in the environment of what the step started.
    """

    def __init__(self, lifeline: int, status: int, mark: str) -> None:
        self._mark = mark
        self._lifeline = lifeline
        self._status = status
        self._said = b""
        self._ended = False

    @property
    def guard_pid(self) -> int | None:
        """The guard's process id, once it has started."""
        head, newline, _ = self._said.partition(b"\n")
        return int(head) if newline else None

    def wait(self, timeout_s: float) -> int | None:
        """The step's exit status (128 + n for signal n), or None if it still runs after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self._ended:
            ready, _, _ = select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._status, 256)
            self._said += data
            self._ended = not data
        lines = self._said.split()
        if len(lines) == 2:
            return int(lines[1])
        self._kill_rest()
        return 128 + signal.SIGKILL

    def memory_bytes(self) -> int:
        """Resident memory of the whole tree; pages that processes share count for each."""
        total = 0
        if self.guard_pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self.guard_pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        total += process.memory_info().rss
        return total

    def kill(self) -> None:
        """End the tree if it still runs, and wait until it is gone. To be called once, at the end, in any case."""
        os.close(self._lifeline)
        if self.wait(KILL_S) is None and self.guard_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.guard_pid, signal.SIGKILL)
            self.wait(KILL_S)
        os.close(self._status)

    def _kill_rest(self) -> None:
        """The guard was killed: what it guarded is ours to end, told by its session or by its mark."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.guard_pid or process.environ().get(STEP_MARK) == self._mark:
                    process.kill()
