"""Child processes of the embedded service: started again when they die, and never left over when the service dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_PAUSE_S = 5.0
SETTLED_S = 30.0
"""A child that lived so long is started again without a pause."""
PR_SET_PDEATHSIG = 1


@dataclass(kw_only=True)
class Child:
    """One child process and how to start it again."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    shows_output: bool = False
    """Its standard output goes to ours (the API prints the sign-in link); else to its log."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    deaths: int = 0
    pause_s: float = 0.0
    due: float = 0.0

    def start(self) -> None:
        """Start it. Only the main thread may: the death signal is tied to the thread that forks."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=None if self.shows_output else log,
                stderr=log,
                start_new_session=True,  # ctrl-C reaches only the supervisor, which stops children in order
                preexec_fn=_death_signal(os.getpid()),
            )
        self.started = time.monotonic()

    def look_after(self) -> None:
        """Start it again if it has died, after a pause that doubles while it keeps dying."""
        now = time.monotonic()
        if self.process is not None:
            if self.process.poll() is None:
                return
            self.process = None
            self.deaths += 1
            settled = now - self.started > SETTLED_S
            self.pause_s = 0.0 if settled else min(max(2 * self.pause_s, 0.1), LONGEST_PAUSE_S)
            self.due = now + self.pause_s
        if now >= self.due:
            self.start()

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, deadline: float) -> None:
        """Wait until it has ended; kill it at the deadline."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _death_signal(parent: int) -> Callable[[], None]:
    """What a child does before it becomes its program: die with us. Safe here: this process has one thread."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
