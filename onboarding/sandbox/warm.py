"""The client of the warm parent (``zygote.py``): starts it, and has it fork confined programs.

One warm parent serves a process and everything forked from it: the worker's step host starts one before its steps are
forked, a single command starts one when it first needs it. Free of torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from onboarding.sandbox.view import base_environment, import_path

MODULES = (
    "onboarding.stages.judge.child",
    "onboarding.stages.align.child",
    "onboarding.stages.throughput.child",
    "transformers.models.auto.modeling_auto",
)
"""What is imported beforehand: the programs that jobs run confined, and what they import late."""
START_S = 120.0
"""Longest time for the imports; a busy machine may need a minute."""


class WarmUnavailable(Exception):
    """The warm parent cannot serve; a cold start can."""


def environment() -> dict[str, str]:
    """What the imports of the warm parent see: nothing of ours."""
    return base_environment("/nonexistent") | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}


class WarmParent:
    """One warm parent process, with a minimal environment. It dies with the thread that starts it."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self.mark = f"warm-{os.urandom(8).hex()}"
        """In the arguments of the parent and of everything forked from it."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "onboarding.sandbox.zygote"),
                    *(str(theirs.fileno()), str(os.getpid()), self.mark, *modules),
                ],
                pass_fds=(theirs.fileno(),),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._owner = os.getpid()
        self.pid = self._process.pid

    def fork(self, config: dict[str, Any], descriptors: Sequence[int]) -> Forked:
        """Fork one confined program; waits until its outermost process exists.

        Args:
            config: of ``launcher.py``, with ``module`` and ``arguments``.
            descriptors: what the program inherits.

        Raises:
            WarmUnavailable: the parent has died or does not answer.
        """
        pipes = [os.pipe() for _ in range(3)]
        theirs = [write for _, write in pipes]
        try:
            socket.send_fds(self._control, [json.dumps(config).encode()], [*theirs, *descriptors])
        except OSError as error:
            for read, _ in pipes:
                os.close(read)
            raise WarmUnavailable(str(error)) from error
        finally:
            for write in theirs:
                os.close(write)
        status, stdout, stderr = (read for read, _ in pipes)
        return Forked(status, stdout, stderr)

    def close(self) -> None:
        """End the parent; programs that run are not touched."""
        self._control.close()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()


class Forked:
    """A confined program forked from the warm parent, with the part of ``Popen`` that :class:`Running` uses."""

    def __init__(self, status: int, stdout: int, stderr: int) -> None:
        self._status = status
        self._said = b""
        self.returncode: int | None = None
        self.stdout = io.FileIO(stdout)
        self.stderr = io.FileIO(stderr)
        deadline = time.monotonic() + START_S
        while b"\n" not in self._said and self.returncode is None and time.monotonic() < deadline:
            self._read(1.0)
        if b"\n" not in self._said:
            self.stdout.close()
            self.stderr.close()
            self._close()
            raise WarmUnavailable("the warm parent does not answer")
        self.pid = int(self._said.split(b"\n", 1)[0])

    def watched(self) -> int:
        """A new descriptor that is readable once it has ended."""
        return os.dup(self._status) if self._status >= 0 else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def poll(self) -> int | None:
        """The exit status if it has ended, else None."""
        while self.returncode is None and self._read(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended in ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            self._read(left)
        return self.returncode

    def terminate(self) -> None:
        """Ask the outermost process to end everything."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGTERM)

    def _read(self, seconds: float | None) -> bool:
        """Wait for news of it; whether there was any."""
        if not select.select([self._status], [], [], seconds)[0]:
            return False
        data = os.read(self._status, 64)
        self._said += data
        if not data:  # nobody holds the other end: it has ended
            lines = self._said.split()
            self.returncode = int(lines[1]) if len(lines) == 2 else 128 + signal.SIGKILL
            self._close()
        return True

    def _close(self) -> None:
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        if self.returncode is None:
            self.returncode = 128 + signal.SIGKILL


_shared: WarmParent | None = None


def prestart() -> None:
    """Start the shared parent now; this process and its later forks share it."""
    global _shared
    if _shared is None:
        _shared = WarmParent()


def shared() -> WarmParent | None:
    """The parent that was prestarted here or before this process was forked; None without one, or if it broke."""
    return _shared


def give_up() -> None:
    """Forget the shared parent: it failed."""
    global _shared
    if _shared is not None:
        _shared.close()
    _shared = None
