"""Confines itself and starts one program: the sandbox for hosts without bubblewrap, and for warm starts.

Run as a script (``python -I -S launcher.py CONFIG``) so that it starts in some 20 ms: standard library only, nothing
imported from this project. CONFIG is JSON made by ``backends.py``. With ``namespaces`` it builds a fresh root (tmpfs
first, then read-only binds), a fresh /proc and a minimal /dev; without, Landlock keeps the process to the same files.
In both, a supervisor stays behind that reaps every descendant and ends them all when the program ends.

``zygote.py`` calls :func:`confined` in a fork of itself: the same confinement, but the program is a function that is
imported already.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

Become = Callable[[dict[str, Any]], None]
"""Turns a process that has given up every privilege into the program; returns only where that failed."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_NOBODY = 65534


def check(result: int, what: str) -> int:
    """Raise OSError if a libc call failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(result, f"mount {target}")


def prctl(option: int, argument: int = 0, more: Any = 0) -> None:
    """prctl(2)."""
    check(_LIBC.prctl(option, ctypes.c_ulong(argument), more, 0, 0), f"prctl {option}")


def enter_namespaces(user: bool) -> None:
    """New mount, pid (for children), network, ipc and uts namespaces; with ``user`` mapped to nobody."""
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | (_NEWUSER if user else 0)
    check(_LIBC.unshare(flags), "unshare")
    if user:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def make_place(path: str, like: str) -> None:
    """An empty folder or file at ``path`` to mount ``like`` on."""
    if os.path.isdir(like):
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def bind(source: str, target: str, *, read_only: bool, device: bool = False) -> None:
    """Bind ``source`` at ``target``, submounts included, without set-uid programs."""
    make_place(target, source)
    mount(source, target, "", _MS_BIND | _MS_REC)
    attributes = (1 if read_only else 0) | 2 | (0 if device else 4)  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = _LIBC.syscall(_MOUNT_SETATTR, -100, target.encode(), 0x8000, wanted, len(wanted))  # AT_RECURSIVE
    if result < 0:
        if ctypes.get_errno() != 38:
            check(result, f"mount_setattr {target}")
        # before Linux 5.12: the top mount only, so a source with submounts must not be shown
        flags = _MS_BIND | _MS_REMOUNT | _MS_NOSUID | (0 if device else _MS_NODEV)
        mount("", target, "", flags | (_MS_RDONLY if read_only else 0))


def build_root(config: dict[str, Any]) -> None:
    """A fresh root with exactly the configured files; the old one is detached."""
    base, old = "/tmp", "/.host"
    size = config["tmp_bytes"]
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode=755")
    os.mkdir(base + old)
    os.chdir(base)
    check(_LIBC.syscall(_PIVOT_ROOT[os.uname().machine], b".", (base + old)[len(base) + 1 :].encode()), "pivot_root")
    os.chdir("/")
    # every tmpfs before the binds: a bind below /tmp must not be hidden by it
    for folder, flags in (("/tmp", _MS_NOSUID | _MS_NODEV), ("/dev", _MS_NOSUID | _MS_NOEXEC)):
        os.makedirs(folder, exist_ok=True)
        mount("tmpfs", folder, "tmpfs", flags, f"size={size},mode=1777" if folder == "/tmp" else "size=1m,mode=755")
    os.mkdir("/dev/shm")
    mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode=1777")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, f"/dev/{name}")
    for node in config["devices"]:
        bind(old + node, node, read_only=False, device=True)
    os.mkdir("/proc")
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for target, link in config["symlinks"]:
        os.symlink(target, link)
    for host, inside in config["read_only"]:
        bind(old + host, inside, read_only=True)
    bind(old + config["scratch"], config["scratch"], read_only=False)
    # what a capability-free owner could still write through: kernel settings under /proc
    for name in ("sys", "sysrq-trigger", "irq", "bus"):
        if os.path.exists(f"/proc/{name}"):
            bind(f"/proc/{name}", f"/proc/{name}", read_only=True)
    check(_LIBC.umount2(old.encode(), 2), "detach the host's root")
    os.rmdir(old)
    for folder in ("/", "/dev"):
        mount("", folder, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | (_MS_NODEV if folder == "/" else 0))


def drop_privileges(uid: int | None) -> None:
    """No capability, now or by any later exec; with ``uid`` also another user."""
    for capability in range(64):
        if _LIBC.prctl(24, ctypes.c_ulong(capability), 0, 0, 0) < 0:  # PR_CAPBSET_DROP
            break
    if uid is not None and os.getuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    header, empty = struct.pack("=Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    check(_LIBC.capset(header, empty), "capset")


def landlock_abi() -> int:
    """Version of Landlock here; negative where the kernel has none."""
    return int(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1))


def restrict_files(config: dict[str, Any]) -> None:
    """Landlock: the configured files only, no TCP, no signals to the outside (as far as this kernel knows how)."""
    abi = check(landlock_abi(), "landlock")
    known = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)  # file access rights by ABI
    handled = (1 << known) - 1
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = check(_LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock ruleset")
    of_files = 0b111 | 1 << 14 | 1 << 15  # execute, write, read, truncate, device ioctl
    read, write_file = 0b1101, 0b0110 | 1 << 14 | 1 << 15
    rules = [(host, read) for host, _ in config["read_only"]] + [(config["scratch"], handled)]
    rules += [(node, write_file) for node in config["devices"]]
    rules += [(path, read) for path in ("/proc/cpuinfo", "/proc/meminfo", "/proc/filesystems")]
    rules += [(folder, 0b1000) for folder in config["listed"]]  # names only: the import system lists its folders
    for path, access in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = access & handled & (-1 if os.path.isdir(path) else of_files)
        rule = struct.pack("=Qi", allowed, descriptor)
        check(_LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock {path}")
        os.close(descriptor)
    check(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def install_filter(code: bytes) -> None:
    """The system-call filter, for good."""
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    prctl(22, 2, ctypes.byref(Program(len(code) // 8, ctypes.addressof(buffer))))  # PR_SET_SECCOMP, filter


def set_rlimits(limits: dict[str, int]) -> None:
    """Per-process limits; soft and hard alike, never above a hard limit that is in force."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def abandoned(lifeline: int, also: int = -1) -> bool:
    """Whether nobody reads a pipe any more, of which ``lifeline`` is the write end.

    Args:
        also: a descriptor to wait for: the answer is given when it is readable or the pipe is abandoned.
    """
    watched = select.poll()
    watched.register(lifeline, 0)  # errors are reported in any case
    if also >= 0:
        watched.register(also, select.POLLIN)
    return any(descriptor == lifeline for descriptor, _ in watched.poll(None if also >= 0 else 0))


def reap_until(child: int, lifeline: int = -1) -> int:
    """Reap every descendant that ends; the program's exit status (128 + n for signal n) once it ends itself.

    Args:
        lifeline: write end of a pipe; when nobody reads it any more this returns 143, the child still running.
    """
    if lifeline >= 0 and abandoned(lifeline, os.pidfd_open(child)):
        return 143
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_descendants() -> None:
    """Kill what is left below this process (it is their subreaper) until there is nothing."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def execute(config: dict[str, Any]) -> None:
    """Become the program ``argv``."""
    os.execve(config["argv"][0], config["argv"], config["env"])


def start_program(config: dict[str, Any], become: Become) -> NoReturn:
    """Give up every privilege and become the program."""
    try:
        drop_privileges(config["uid"])
        prctl(1, signal.SIGKILL)  # again: a change of user clears it
        if config["landlock"]:
            restrict_files(config)
        set_rlimits(config["rlimits"])
        os.chdir(config["scratch"])
        install_filter(bytes.fromhex(config["filter"]))
        become(config)
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
    os._exit(125)


def supervise(config: dict[str, Any], become: Become, lifeline: int = -1) -> int:
    """Build the root where asked, start the program, and see all of it end."""
    if config["namespaces"]:
        build_root(config)
    child = os.fork()
    if child == 0:
        if lifeline >= 0:
            os.close(lifeline)
        start_program(config, become)
    for descriptor in config["fds"]:
        os.close(descriptor)
    return reap_until(child, lifeline)


def confined(config: dict[str, Any], become: Become, lifeline: int = -1) -> int:
    """Run the program confined, as a descendant of this process; its exit status (143: nobody waits for it any more).

    The caller must end then: in namespaces, the rest of the tree dies with it.

    Args:
        lifeline: see :func:`reap_until`; no descendant keeps it.

    Raises:
        OSError: the sandbox could not be made.
    """
    for folder in config["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    if not config["namespaces"]:
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: daemons come back to us
        signal.signal(signal.SIGTERM, _end)
        status = supervise(config, become, lifeline)
        end_descendants()
        return status
    enter_namespaces(config["user_namespace"])
    init = os.fork()
    if init == 0:
        prctl(1, signal.SIGKILL)
        if lifeline >= 0:
            if abandoned(lifeline):  # the parent may have seen it and ended before the line above
                os._exit(143)
            os.close(lifeline)
        os._exit(_guarded(config, become))
    for descriptor in config["fds"]:
        os.close(descriptor)
    return reap_until(init, lifeline)


def main() -> int:
    """Entry point. Exit status: the program's, or 125 where the sandbox could not be made."""
    config = json.loads(sys.argv[1])
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the one who started us
    return confined(config, execute)


def _end(*_: Any) -> NoReturn:
    """The parent asks for the end of everything."""
    end_descendants()
    os._exit(143)


def _guarded(config: dict[str, Any], become: Become) -> int:
    try:
        return supervise(config, become)
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
        return 125


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as failure:
        os.write(2, f"sandbox: {failure}\n".encode())
        sys.exit(125)
