"""A step's process tree as its supervisor sees it: start behind a guard, look at its memory, end it whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

GUARD = Path(__file__).with_name("guard.py")


class GuardedProcess:
    """A command under ``guard.py``: closing the lifeline, or our death, ends the whole tree.

    Args:
        command: what to run.
        log: file that takes its output.
        log_bytes: size at which the log is capped.
        environment: the command's environment.
    """

    def __init__(self, command: Sequence[str], *, log: Path, log_bytes: int, environment: dict[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        lifeline, self._lifeline = os.pipe()  # the write end is never inherited
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(lifeline), str(log), str(log_bytes), *command],
                pass_fds=(lifeline,),
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status (128 + n for signal n), or None if it still runs after ``timeout_s`` seconds."""
        try:
            code = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code < 0:  # the guard itself was killed: what it guarded is ours to end
            self._kill_session()
            return 128 - code
        return code

    def memory_bytes(self) -> int:
        """Resident memory of the whole tree, shared pages counted once per process."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._guard.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += process.memory_info().rss
        return total

    def kill(self) -> None:
        """End the tree and wait until it is gone."""
        self.close()
        try:
            code = self._guard.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        if code < 0:
            self._kill_session()

    def close(self) -> None:
        """Close the lifeline (again)."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _kill_session(self) -> None:
        """Kill what is left of the guard's session."""
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._guard.pid:
                    os.kill(pid, signal.SIGKILL)
