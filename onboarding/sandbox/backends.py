"""The ways to confine a process, best first, and the choice among them by trial.

1. ``bubblewrap``: the packaged tool, own user, mount, pid, network, ipc namespaces.
2. ``namespaces``: the same by ``launcher.py`` where bubblewrap is not installed.
3. ``root namespaces``: as root without a user namespace (CUDA refuses to start inside one on some drivers).
4. ``landlock``: no namespaces; Landlock for files, the filter for everything else, another user when root.
5. ``none``: only if the operator says so.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboarding.sandbox import seccomp
from onboarding.sandbox.limits import Limits
from onboarding.sandbox.view import ROOT, View, python_paths

NOBODY = 65534
LAUNCHER = Path(__file__).with_name("launcher.py")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to confine; the flags say what ``launcher.py`` does."""

    name: str
    words: str
    """For reports and ``doctor``."""
    namespaces: bool
    user_namespace: bool = False
    landlock: bool = False
    confines: bool = True


BUBBLEWRAP = Backend(
    name="bubblewrap",
    words="bubblewrap: own user, mount, process and network namespaces, no capabilities, system-call filter",
    namespaces=True,
    user_namespace=True,
)
NAMESPACES = Backend(
    name="namespaces",
    words="own user, mount, process and network namespaces, no capabilities, system-call filter",
    namespaces=True,
    user_namespace=True,
)
ROOT_NAMESPACES = Backend(
    name="root namespaces",
    words="own mount, process and network namespaces, user nobody, no capabilities, system-call filter",
    namespaces=True,
)
LANDLOCK = Backend(
    name="landlock",
    words="Landlock for files, system-call filter for network and processes, no capabilities, resource limits",
    namespaces=False,
    landlock=True,
)
NONE = Backend(name="none", words="no sandbox (the operator said so)", namespaces=False, confines=False)
ORDER = (BUBBLEWRAP, NAMESPACES, ROOT_NAMESPACES, LANDLOCK)
WARM_ORDER = (NAMESPACES, ROOT_NAMESPACES, BUBBLEWRAP, LANDLOCK)
"""Where a warm parent runs: bubblewrap can only start a program afresh."""


def rlimits(limits: Limits, *, gpu: bool, grouped: bool) -> dict[str, int]:
    """Per-process limits by ``resource`` name; what a control group holds better is left to it."""
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_MEMLOCK": 64 * 2**20,
    }
    if gpu:
        del wanted["RLIMIT_MEMLOCK"]
    if not grouped:
        wanted["RLIMIT_NPROC"] = limits.processes
        if not gpu:  # CUDA reserves far more address space than it uses
            wanted["RLIMIT_AS"] = limits.memory_bytes + 2**30
    return wanted


def available(backend: Backend) -> bool:
    """Cheap conditions; whether it works is for a trial to say."""
    if not seccomp.supported() or platform.system() != "Linux":
        return False
    if backend is BUBBLEWRAP:
        return shutil.which("bwrap") is not None and bubblewrap_version() >= (0, 8)
    if backend is ROOT_NAMESPACES:
        return os.geteuid() == 0
    return True


def bubblewrap() -> str:
    """Full path of the installed program: it starts with an empty environment, where no PATH finds it."""
    return shutil.which("bwrap") or "bwrap"


@functools.cache
def bubblewrap_version() -> tuple[int, ...]:
    """Version of the installed bubblewrap; ``--disable-userns`` came with 0.8."""
    try:
        text = subprocess.run([bubblewrap(), "--version"], capture_output=True, text=True, timeout=10).stdout
        return tuple(int(part) for part in text.split()[-1].split("."))
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return (0,)


def bubblewrap_command(view: View, argv: Sequence[str], limits: Limits, fds: dict[str, int]) -> list[str]:
    """The bubblewrap command line. ``fds``: ``seccomp``, ``info`` and ``block`` descriptors that it inherits."""
    size = str(min(limits.memory_bytes, limits.scratch_bytes))
    command = [
        bubblewrap(),
        "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL",
        "--disable-userns", "--die-with-parent", "--new-session", "--hostname", "sandbox",
        "--info-fd", str(fds["info"]), "--block-fd", str(fds["block"]), "--seccomp", str(fds["seccomp"]),
        "--proc", "/proc", "--dev", "/dev",
        "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/dev/shm",
    ]  # fmt: skip
    for device in view.devices:
        if "nvidia" in device:
            command += ["--dev-bind", device, device]
    for target, link in view.symlinks:
        command += ["--symlink", target, link]
    for host, inside in view.read_only:
        command += ["--ro-bind", host, inside]
    command += ["--bind", view.scratch, view.scratch, "--chdir", view.scratch]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--", *argv]


def launcher_config(
    backend: Backend, view: View, limits: Limits, *, cgroups: Sequence[Path], gpu: bool
) -> dict[str, Any]:
    """What ``launcher.py`` needs to know of one of the other backends; the program itself is added by the caller."""
    return {
        "namespaces": backend.namespaces,
        "user_namespace": backend.user_namespace,
        "landlock": backend.landlock,
        "uid": NOBODY if drops_user(backend, view.scratch) else None,
        "cgroups": [str(folder) for folder in cgroups],
        "rlimits": rlimits(limits, gpu=gpu, grouped=bool(cgroups)),
        "tmp_bytes": min(limits.memory_bytes, limits.scratch_bytes),
        "read_only": view.read_only,
        "symlinks": view.symlinks,
        "devices": view.devices,
        "scratch": view.scratch,
        "listed": [str(ROOT)],
        "filter": seccomp.program(namespaces=backend.namespaces, gpu=gpu).hex(),
    }


def launcher_command(config: dict[str, Any]) -> list[str]:
    """The command line of ``launcher.py``; ``config`` holds ``argv``, ``env`` and ``fds`` besides."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(config)]


def drops_user(backend: Backend, scratch: str) -> bool:
    """Whether a root parent turns the program into another user.

    Not inside a user namespace (root is nobody there already), and not where that user could not even reach the
    interpreter (a Python below a 0700 home folder): then it stays root by name, without any capability.
    """
    if os.geteuid() != 0 or backend.user_namespace or not backend.confines:
        return False
    if backend.namespaces:  # the parents are made anew inside
        return all(_open_to_all(path) for path in python_paths())
    return all(_open_to_all(p) for path in [*python_paths(), Path(scratch).parent] for p in [path, *path.parents])


def _open_to_all(path: Path) -> bool:
    mode = path.resolve().stat().st_mode
    return bool(mode & stat.S_IXOTH) and bool(mode & stat.S_IROTH or not path.is_dir() or mode & stat.S_IXOTH)
