"""Starts a confined process, watches its limits, and ends its whole tree."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from onboarding.sandbox import seccomp
from onboarding.sandbox.backends import (
    BUBBLEWRAP,
    NOBODY,
    Backend,
    bubblewrap_command,
    drops_user,
    launcher_command,
    launcher_config,
    rlimits,
)
from onboarding.sandbox.cgroups import Group
from onboarding.sandbox.limits import Limits, Outcome
from onboarding.sandbox.usage import describe_status, folder_bytes, tree_seconds, tree_usage
from onboarding.sandbox.view import View, base_environment, build_view
from onboarding.sandbox.warm import Forked, WarmParent

TAIL_BYTES = 16 * 1024
_TICK_S = 0.1


def start(
    backend: Backend,
    argv: Sequence[str],
    *,
    scratch: Path,
    read_only: Sequence[Path],
    limits: Limits,
    env: dict[str, str],
    fds: Sequence[int] = (),
    gpu: bool = False,
) -> Running:
    """Start ``argv`` under a backend.

    Call it from a thread that outlives the process: the tree dies with the thread that started it (PDEATHSIG).

    Raises:
        FileNotFoundError: scratch or a read-only path is missing.
    """
    view = build_view(scratch, read_only, gpu=gpu)
    group = Group.create(limits) if backend.confines else None
    full_env = base_environment(view.scratch) | env
    common: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "start_new_session": True,
        "bufsize": 0,
        "cwd": view.scratch,
        "env": full_env,
    }
    try:
        if backend is BUBBLEWRAP:
            process = _start_bubblewrap(view, argv, limits, group, fds, gpu, common)
        elif backend.confines:
            if drops_user(backend, view.scratch):
                os.chown(view.scratch, NOBODY, NOBODY)
            folders = group.folders if group else []
            config = launcher_config(backend, view, limits, cgroups=folders, gpu=gpu)
            command = launcher_command(config | {"argv": list(argv), "env": full_env, "fds": list(fds)})
            process = subprocess.Popen(command, pass_fds=fds, **common)
        else:
            process = subprocess.Popen(list(argv), pass_fds=fds, **common)
    except BaseException:
        if group:
            group.kill()
            group.remove()
        raise
    return Running(process, backend, group, Path(view.scratch), limits)


def start_warm(
    parent: WarmParent,
    backend: Backend,
    module: str,
    arguments: Sequence[str],
    *,
    scratch: Path,
    read_only: Sequence[Path],
    limits: Limits,
    env: dict[str, str],
    fds: Sequence[int] = (),
) -> Running:
    """Have the warm parent fork a program, confined by one of the backends of ``launcher.py``.

    Args:
        module: run as ``python -m`` would; its arguments are the numbers of its descriptors, then ``arguments``.

    Raises:
        WarmUnavailable: the parent does not serve.
        FileNotFoundError: scratch or a read-only path is missing.
    """
    view = build_view(scratch, read_only, gpu=False)
    group = Group.create(limits)
    if drops_user(backend, view.scratch):
        os.chown(view.scratch, NOBODY, NOBODY)
    folders = group.folders if group else []
    config = launcher_config(backend, view, limits, cgroups=folders, gpu=False) | {
        "module": module,
        "arguments": list(arguments),
        "env": base_environment(view.scratch) | env,
    }
    try:
        forked = parent.fork(config, fds)
    except BaseException:
        if group:
            group.kill()
            group.remove()
        raise
    return Running(forked, backend, group, Path(view.scratch), limits)


def _start_bubblewrap(
    view: View,
    argv: Sequence[str],
    limits: Limits,
    group: Group | None,
    fds: Sequence[int],
    gpu: bool,
    common: dict[str, Any],
) -> subprocess.Popen[bytes]:
    """bubblewrap waits at ``--block-fd`` until its child is in the control groups and has its limits."""
    filter_fd = os.memfd_create("filter")
    os.write(filter_fd, seccomp.program(namespaces=True, gpu=gpu))
    os.lseek(filter_fd, 0, os.SEEK_SET)
    info_read, info_write = os.pipe()
    block_read, block_write = os.pipe()
    try:
        own = {"seccomp": filter_fd, "info": info_write, "block": block_read}
        command = bubblewrap_command(view, argv, limits, own)
        process = subprocess.Popen(command, pass_fds=[*fds, *own.values()], **common)
        os.close(info_write)
        info_write = -1
        with open(info_read, "rb", closefd=False) as stream:
            text = stream.read()
        if text:  # empty: bubblewrap failed and says why on stderr
            child = int(json.loads(text)["child-pid"])
            if group:
                group.add(process.pid)
                group.add(child)
            for name, value in rlimits(limits, gpu=gpu, grouped=group is not None).items():
                kind = getattr(resource, name)
                hard = resource.prlimit(child, kind)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.prlimit(child, kind, (value, value))
        os.write(block_write, b"x")
        return process
    finally:
        for descriptor in (filter_fd, info_read, info_write, block_read, block_write):
            if descriptor >= 0:
                os.close(descriptor)


class Running:
    """A confined process tree. Always :meth:`wait` for it or :meth:`close` it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Forked,
        backend: Backend,
        group: Group | None,
        scratch: Path,
        limits: Limits,
    ) -> None:
        self._process = process
        self._backend = backend
        self._group = group
        self._scratch = scratch
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._tails = {"stdout": b"", "stderr": b""}
        self._printed = 0
        self._started = time.monotonic()
        self._next_look = 0.0
        self.pid = process.pid
        """Of the outermost process, as the host sees it."""
        self._ended = process.watched() if isinstance(process, Forked) else os.pidfd_open(process.pid)
        self._selector.register(self._ended, selectors.EVENT_READ, "ended")
        for name in self._tails:
            stream: IO[bytes] = getattr(process, name)
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, name)

    def watch(self, file: int | None = None, timeout_s: float = _TICK_S) -> tuple[bool, str]:
        """One turn: drain output, look at the limits (all but wall time), wait at most ``timeout_s``.

        Args:
            file: a descriptor that the caller reads from; the turn ends when it is readable.

        Returns:
            Whether ``file`` is readable, and the reason to end the tree (``output``, ``disk``, ``memory``,
            ``processes``; ``exit`` when the process has ended), empty while all is well.
        """
        readable = False
        if file is not None:
            self._selector.register(file, selectors.EVENT_READ, "caller")
        try:
            for key, _ in self._selector.select(timeout_s):
                if key.data == "caller":
                    readable = True
                elif key.data != "ended":
                    self._drain(key.fileobj, key.data)  # type: ignore[arg-type]
        finally:
            if file is not None:
                self._selector.unregister(file)
        if self._printed > self._limits.output_bytes:
            return readable, "output"
        if self._process.poll() is not None:
            return readable, "exit"
        return readable, self._look()

    def wait(self, on_line: Callable[[str], None] | None = None) -> Outcome:
        """Run to the end or to a limit, then end the whole tree."""
        self._on_line = on_line
        deadline = time.monotonic() + self._limits.wall_s
        reason = ""
        while not reason:
            left = deadline - time.monotonic()
            reason = "time" if left <= 0 else self.watch(timeout_s=min(left, _TICK_S))[1]
        return self.close("" if reason == "exit" else reason)

    def cpu_seconds(self) -> float:
        """CPU time of the tree so far (of members that still live, or were waited for by one)."""
        return tree_seconds(self.pid)

    def close(self, reason: str = "") -> Outcome:
        """End the whole tree now; ``reason`` is reported, or else read from the exit status."""
        ended_alone = self._process.poll() is not None
        self._kill()
        self._process.wait()
        wall_s = time.monotonic() - self._started
        self._selector.unregister(self._ended)
        os.close(self._ended)
        for key in list(self._selector.get_map().values()):
            self._drain(key.fileobj, key.data)  # type: ignore[arg-type]
        out_of_memory = self._group is not None and self._group.out_of_memory()
        if self._group:
            self._group.remove()
            self._group = None
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        code = self._process.wait()
        code = 128 - code if code < 0 else code
        if not reason and out_of_memory and code:
            reason = "memory"
        if not reason and ended_alone:
            reason = describe_status(code)
        return Outcome(
            returncode=code,
            reason=reason,
            wall_s=wall_s,
            stdout_tail=self._tails["stdout"].decode(errors="replace"),
            stderr_tail=self._tails["stderr"].decode(errors="replace"),
        )

    _on_line: Callable[[str], None] | None = None
    _line = b""

    def _drain(self, stream: IO[bytes], name: str) -> None:
        """Read what is there, at most a megabyte a turn, keeping only the tail."""
        for _ in range(16):
            try:
                data = os.read(stream.fileno(), 65536)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(stream)
                return
            self._printed += len(data)
            self._tails[name] = (self._tails[name] + data)[-TAIL_BYTES:]
            if name == "stdout" and self._on_line:
                *lines, self._line = (self._line + data).split(b"\n")
                self._line = self._line[-TAIL_BYTES:]
                for line in lines:
                    self._on_line(line[-TAIL_BYTES:].decode(errors="replace"))

    def _look(self) -> str:
        """Every 0.2 s: the size of the scratch folder and, without control groups, of the tree."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + 0.2
        if folder_bytes(self._scratch, self._limits.scratch_bytes) > self._limits.scratch_bytes:
            return "disk"
        if self._group is None:
            memory, processes = tree_usage(self.pid)
            if memory > self._limits.memory_bytes:
                return "memory"
            if processes > self._limits.processes:
                return "processes"
        return ""

    def _kill(self) -> None:
        if not self._backend.namespaces and self._process.poll() is None and self._backend.confines:
            # the supervisor ends its descendants, which no process group holds together
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        # a forked program that has ended is not ours to bury: its number may be somebody else's by now
        if not (isinstance(self._process, Forked) and self._process.poll() is not None):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._group:
            self._group.kill()
