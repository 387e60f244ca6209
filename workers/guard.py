"""The process between a supervisor and a step: nothing of the step outlives the supervisor, nor the step itself.

- It holds the read end of a pipe, the *lifeline*, whose write end only the supervisor has. When it closes, by intent or
  because the supervisor was killed, it kills every descendant. (A death signal to the step alone would miss the step's
  own children, and is tied to the *thread* that forked, which in a pool of threads may end at any time.)
- It is a subreaper: what the step leaves behind becomes its child, and is killed too.
- If the guard itself is killed, the step's death signal fires: the guard forks from its only thread.
- It copies the step's output into a log of limited size.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guard(step: Callable[[], None], *, lifeline: int, private: tuple[int, ...], log_path: str, log_bytes: int) -> int:
    """Fork ``step`` and stay until it has ended or the lifeline closes; then kill all that it left.

    Args:
        step: runs in the child; its process ends when it returns.
        lifeline: read end of the pipe that the supervisor holds open.
        private: further descriptors that the child must not have.
        log_path: file that takes the child's output.
        log_bytes: size at which that file is capped.

    Returns:
        The child's exit status, 128 + n for signal n.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the lifeline and SIGKILL stop a guard
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    output, child_output = os.pipe()
    child = start(step, child_output, (lifeline, output, *private))
    os.close(child_output)
    wakeup = watch_children()
    with Log(log_path, log_bytes) as log:
        status = serve(child, lifeline, output, wakeup, log)
        kill_descendants()
        os.set_blocking(output, False)
        log.copy(output)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def serve(child: int, lifeline: int, output: int, wakeup: int, log: Log) -> int | None:
    """Copy output until the child ends (its wait status) or the lifeline closes (None)."""
    watched = [lifeline, output, wakeup]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if output in ready and not log.copy(output, once=True):
            watched.remove(output)
        if wakeup in ready:
            os.read(wakeup, 4096)
            while (ended := reap()) is not None:
                if ended[0] == child:
                    return ended[1]
        if lifeline in ready:
            return None


def start(step: Callable[[], None], output: int, private: tuple[int, ...]) -> int:
    """Fork the step into a process group of its own, bound to this process's life."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the death signal was set
            os._exit(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in private:
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        step()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prctl(option: int, value: int) -> None:
    """Set one attribute of this process (prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def watch_children() -> int:
    """A descriptor that becomes readable when a child changes its state."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.write(write, b"\0")  # the child may have ended before
    return read


def reap() -> tuple[int, int] | None:
    """(pid, wait status) of a child that has ended, if there is one."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def kill_descendants() -> None:
    """Kill everything below this process; orphans come here, so at the end there is no child left."""
    while True:
        below = descendants(os.getpid())
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while reap() is not None:
            continue
        if not below:
            return
        time.sleep(0.002)


def descendants(root: int) -> list[int]:
    """Pids of all processes below ``root``, zombies left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


class Log:
    """A file that takes at most ``limit`` bytes; what comes after is read and dropped."""

    def __init__(self, path: str, limit: int) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.room = limit - os.fstat(self.file).st_size

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)

    def copy(self, source: int, *, once: bool = False) -> bool:
        """Copy what can be read; False at the end of the source."""
        while True:
            try:
                data = os.read(source, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self.room > 0:
                os.write(self.file, data[: self.room])
                self.room -= len(data)
                if self.room <= 0:
                    os.write(self.file, b"\n[the log reached its limit; the rest is not kept]\n")
            if once:
                return True
