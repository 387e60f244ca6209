"""Attempts to break out of the sandbox, run inside it: what ``doctor`` and the tests try.

Each is a small program that prints ``ESCAPED`` where it got through. It is told of targets on the host: a file to
write and read, a listening port, a process to harm. Floods must be ended by a limit with the right reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from onboarding.sandbox.limits import Limits

if TYPE_CHECKING:
    from onboarding.sandbox import Sandbox
    from onboarding.sandbox.warm import WarmParent

_PRELUDE = """
import ctypes, errno, os, signal, socket, sys, time
secret, port, victim, judge = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None, use_errno=True)
escaped = lambda what: print("ESCAPED", what, flush=True)
def attempt(what, action):
    try:
        if action() not in (None, -1): escaped(what)
    except OSError: pass
"""


@dataclass(frozen=True, kw_only=True)
class Escape:
    """One attempt."""

    name: str
    code: str
    reasons: tuple[str, ...] = ()
    """For floods: the outcome's reason must be one of these; empty: it must only not escape."""


ESCAPES: tuple[Escape, ...] = (
    Escape(
        name="write to the host",
        code="""
for path in (secret, "/etc/passwd-canary", "/usr/canary", sys.prefix + "/canary", os.__file__, "/canary"):
    attempt(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    attempt("chmod " + path, lambda: os.chmod(path, 0o777) or 0)
""",
    ),
    Escape(name="read the host", code="attempt(secret, lambda: os.open(secret, os.O_RDONLY))"),
    Escape(
        name="remount",
        code="""
for path in (b"/", b"/usr", sys.prefix.encode()):
    attempt("remount", lambda: libc.mount(b"", path, b"", ctypes.c_ulong(32 | 4096), b""))
    attempt("bind", lambda: libc.mount(b"/proc", path, b"", ctypes.c_ulong(4096), b""))
attempt("umount", lambda: libc.umount2(b"/usr", 2))
attempt("chroot", lambda: os.chroot("/") or 0)
attempt("mknod", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)) or 0)
""",
    ),
    Escape(
        name="nested namespace",
        code="""
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    attempt("unshare", lambda: libc.unshare(flag))
    pid = libc.syscall(56 if os.uname().machine == "x86_64" else 220, flag | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: escaped("clone")
attempt("setns", lambda: libc.setns(os.open("/proc/self/ns/user", os.O_RDONLY), 0))
""",
    ),
    Escape(
        name="trace a sibling",
        code="""
child = os.fork()
if child == 0:
    time.sleep(5); os._exit(0)
for pid in (child, victim, judge):
    attempt("ptrace", lambda: libc.ptrace(0x4206, pid, 0, 0))  # SEIZE: does not stop it
    attempt("memory", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR) if pid != child else None)
    buffer = ctypes.create_string_buffer(64)
    attempt("process_vm", lambda: libc.process_vm_readv(pid, buffer, 1, buffer, 1, 0))
""",
    ),
    Escape(
        name="connect",
        code="""
def connect(address, family):
    with socket.socket(family) as s: s.settimeout(1); s.connect(address); return 0
attempt("tcp", lambda: connect(("127.0.0.1", port), socket.AF_INET))
attempt("abstract", lambda: connect("\\0onboard-canary", socket.AF_UNIX))
""",
    ),
    Escape(
        name="harm other processes",
        code="""
attempt("kill", lambda: os.kill(victim, signal.SIGKILL) or 0)
try: os.kill(-1, signal.SIGCONT)
except OSError: pass
import resource
attempt("prlimit", lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3)) and 0)
""",
    ),
    Escape(
        name="look at the judge",
        code="""
for pid in (victim, judge):
    for name in ("environ", "maps", "cmdline"):
        def look():
            with open(f"/proc/{pid}/{name}", "rb") as file: return 0 if b"canary" in file.read() else None
        attempt(f"/proc/{pid}/{name}", look)
""",
    ),
    Escape(
        name="fork bomb",
        code="""
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)
""",
        reasons=("time", "processes", "memory", "signal SIGKILL"),
    ),
    Escape(
        name="memory bomb",
        code="""
held = []
while True: held.append(bytearray(os.urandom(1) * (16 << 20)))
""",
        reasons=("memory", "signal SIGKILL", "exit 1"),
    ),
    Escape(
        name="fill the disk",
        code="""
n = 0
while True:
    n += 1
    with open(f"f{n}", "wb") as file: file.write(bytes(4 << 20))
""",
        reasons=("disk", "exit 1"),
    ),
    Escape(name="print without end", code="while True: os.write(1, b'x' * 65536)", reasons=("output",)),
    Escape(
        name="ignore signals and hang",
        code="""
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
        reasons=("time",),
    ),
    Escape(
        name="leave a daemon behind",
        code="""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3): os.close(descriptor)
        time.sleep(60)
    os._exit(0)
time.sleep(0.1)
""",
    ),
)

# What a program that was forked from the warm parent could try besides; its arguments are the same.
FORKED_ESCAPES: tuple[Escape, ...] = (
    Escape(
        name="descriptors of others",
        code="""
import stat
for number in range(1024):
    try: kind = os.fstat(number).st_mode
    except OSError: continue
    if number > 2: escaped(f"descriptor {number}")
    if stat.S_ISSOCK(kind): escaped("the control socket")
""",
    ),
    Escape(
        name="the warm parent",
        code="""
warm = int(sys.argv[5])
def pids():
    try: return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError: return set()
def looks_like(pid):
    try: return b"zygote" in open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError: return False
for pid in pids() - {1, os.getpid()}:
    if looks_like(pid): escaped(f"sees {pid}")
for pid in {warm, os.getppid(), 1}:
    attempt(f"memory of {pid}", lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
    attempt(f"descriptors of {pid}", lambda: os.open(f"/proc/{pid}/fd/1", os.O_WRONLY))
    attempt(f"root of {pid}", lambda: os.open(f"/proc/{pid}/root/etc", os.O_RDONLY))
    attempt(f"ptrace {pid}", lambda: libc.ptrace(0x4206, pid, 0, 0))
    buffer = ctypes.create_string_buffer(64)
    attempt(f"process_vm {pid}", lambda: libc.process_vm_readv(pid, buffer, 1, buffer, 1, 0))
    if pid != 1 and pid != os.getppid(): attempt(f"signal {pid}", lambda: os.kill(pid, signal.SIGTERM) or 0)
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
    try: os.kill(1, number)
    except OSError: pass
""",
    ),
    Escape(
        name="what others left",
        code="""
import builtins, torch
if hasattr(builtins, "onboard_canary"): escaped("a module that another program changed")
builtins.onboard_canary = 1
torch.onboard_canary = 1
for folder in ("/tmp", "/dev/shm"):
    try:
        if os.listdir(folder) not in ([], ["shm"]) and any("canary" in n for n in os.listdir(folder)): escaped(folder)
        open(folder + "/canary", "w").close()
    except OSError: pass
key = 0x0b0a4d
shared = libc.shmget(key, 4096, 0)
if shared >= 0: escaped("shared memory of another program")
libc.shmget(key, 4096, 0o1600)
""",
    ),
)

LIMITS = Limits(
    wall_s=1.0,
    memory_bytes=192 * 2**20,
    processes=24,
    file_bytes=8 * 2**20,
    scratch_bytes=64 * 2**20,
    output_bytes=2**20,
)
"""Small enough for a trial of the floods to be short."""


@contextlib.contextmanager
def targets() -> Iterator[list[str]]:
    """Things on the host that an escape could reach: a secret file, a port, a process, this process."""
    with tempfile.TemporaryDirectory(prefix="onboard-target-") as folder, socket.socket() as listener:
        secret = Path(folder) / "secret"
        secret.write_text("canary")
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        with socket.socket(socket.AF_UNIX) as abstract:
            with contextlib.suppress(OSError):  # another trial on this host may hold the name
                abstract.bind("\0onboard-canary")
                abstract.listen(1)
            victim = subprocess.Popen(["sleep", "120"], env={"CANARY": "canary"})
            try:
                yield [str(secret), str(listener.getsockname()[1]), str(victim.pid), str(os.getpid())]
                if victim.poll() is not None:
                    raise RuntimeError("a process outside the sandbox was killed from inside")
                if secret.read_text() != "canary":
                    raise RuntimeError("a file outside the sandbox was changed from inside")
            finally:
                victim.kill()
                victim.wait()


def attempt(sandbox: Sandbox, escape: Escape, parent: WarmParent | None = None) -> str:
    """Run one attempt, afresh or forked from the warm ``parent``. Empty if the sandbox held, else what went wrong."""
    marker = f"trial-{os.urandom(8).hex()}"
    with tempfile.TemporaryDirectory(prefix="onboard-escape-") as scratch:
        try:
            with targets() as arguments:
                if parent is None:
                    argv = [sys.executable, "-I", "-S", "-c", _PRELUDE + escape.code, *arguments, marker]
                    outcome = sandbox.run(argv, scratch=Path(scratch), limits=LIMITS)
                else:
                    arguments = [escape.name, *arguments, str(parent.pid)]
                    outcome = sandbox.run_module(__name__, arguments, scratch=Path(scratch), limits=LIMITS)
                    marker = parent.mark
        except RuntimeError as error:
            return str(error)
    if "ESCAPED" in outcome.stdout_tail:
        return outcome.stdout_tail.strip()
    if escape.reasons and outcome.reason not in escape.reasons:
        expected = " or ".join(escape.reasons)
        return f"ended by {outcome.reason or 'itself'}, expected {expected}: {outcome.stderr_tail[-200:]}"
    if not escape.reasons and outcome.reason:
        return f"the attempt itself failed: {outcome.reason}: {outcome.stderr_tail[-300:]}"
    if outcome.wall_s > LIMITS.wall_s + 2.5:
        return f"took {outcome.wall_s:.1f} s to end"
    left = left_over(marker, parent.pid if parent else 0)
    return f"left processes behind: {left}" if left else ""


def left_over(marker: str, besides: int = 0) -> list[int]:
    """Processes, ``besides`` one, that still carry the marker in their arguments, after at most two seconds."""
    deadline = time.monotonic() + 2.0
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = marker in process.cmdline() and process.pid != besides
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def main() -> None:
    """``python -m onboarding.sandbox.escapes NAME TARGET...``: make one attempt from within."""
    name = sys.argv.pop(1)
    escape = next(escape for escape in (*ESCAPES, *FORKED_ESCAPES) if escape.name == name)
    exec(_PRELUDE + escape.code, {"__name__": "__main__"})


if __name__ == "__main__":
    main()
