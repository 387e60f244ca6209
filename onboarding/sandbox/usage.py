"""What a process tree and its scratch folder use, and exit statuses in words."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil


def describe_status(code: int) -> str:
    """``""``, ``exit 3`` or ``signal SIGSEGV``."""
    if code == 0:
        return ""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(code - 128).name}"
    return f"exit {code}"


def folder_bytes(folder: Path, enough: int) -> int:
    """Bytes on disk below a folder; stops counting past ``enough``. Links are not followed."""
    total, pending = 0, [str(folder)]
    while pending and total <= enough:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total


def tree_seconds(pid: int) -> float:
    """CPU seconds that a process and its living descendants have used."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def tree_usage(pid: int) -> tuple[int, int]:
    """Resident bytes and number of threads of a process and its descendants."""
    memory = threads = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                threads += process.num_threads()
    return memory, threads
