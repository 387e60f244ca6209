"""Control groups of one run: memory and processes of the whole tree, where this process may make them.

Version 1 (one hierarchy a controller) and version 2 (one for all). A group is a folder; killing it kills the tree,
whatever sessions and process groups its members made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from onboarding.sandbox.limits import Limits


def _own_paths() -> dict[str, str]:
    """controller (empty for version 2) -> this process's path in its hierarchy."""
    paths = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _mounts() -> dict[str, Path]:
    """controller (empty for version 2) -> where its hierarchy is mounted."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split()
            if kind == "cgroup2":
                found[""] = Path(where)
            elif kind == "cgroup":
                for controller in {"memory", "pids"} & set(options.split(",")):
                    found[controller] = Path(where)
    return found


class Group:
    """The control groups of one run; :meth:`create` makes them, :meth:`remove` ends them."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    @classmethod
    def create(cls, limits: Limits) -> Group | None:
        """Groups that hold memory and processes to ``limits``, or None where that is not allowed here."""
        name = f"onboard-{os.getpid()}-{os.urandom(4).hex()}"
        mounts, own = _mounts(), _own_paths()
        group = cls([])
        try:
            if {"memory", "pids"} <= set(mounts):
                values = {
                    "memory": {"memory.limit_in_bytes": limits.memory_bytes},
                    "pids": {"pids.max": limits.processes},
                }
                for controller, settings in values.items():
                    group._make(mounts[controller], own.get(controller, "/"), name, settings)
            elif "" in mounts:
                settings = {"memory.max": limits.memory_bytes, "pids.max": limits.processes}
                group._make(mounts[""], own.get("", "/"), name, settings)
                with contextlib.suppress(OSError):
                    (group.folders[0] / "memory.swap.max").write_text("0")
            else:
                return None
        except OSError:
            group.remove()
            return None
        return group

    def _make(self, mount: Path, own: str, name: str, settings: dict[str, int]) -> None:
        parent = mount / own.lstrip("/")
        if not parent.is_dir():  # seen from inside a container, the own path belongs to the host's view
            parent = mount
        _sweep(parent)
        folder = parent / name
        folder.mkdir()
        self.folders.append(folder)
        for file, value in settings.items():
            (folder / file).write_text(str(value))

    def add(self, pid: int) -> None:
        """Move a process (and its future children) into the groups."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a member for memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        if line.startswith("oom_kill ") and int(line.split()[1]) > 0:
                            return True
        return False

    def kill(self) -> None:
        """Kill every member, and go on until none is left (at most two seconds)."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            members: set[int] = set()
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    (folder / "cgroup.kill").write_text("1")
                with contextlib.suppress(OSError):
                    members.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
            if not members:
                return
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def remove(self) -> None:
        """Remove the groups; members must be dead. A group that is still busy is tried again for a second."""
        for folder in self.folders:
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)


def _sweep(parent: Path) -> None:
    """Remove groups whose maker was killed before it could; a group with members stays, the kernel sees to that."""
    for stale in parent.glob("onboard-*-*"):
        if not Path("/proc", stale.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                stale.rmdir()
