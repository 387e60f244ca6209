"""The checkpoints of a run: folders ``step-00000100`` that appear whole or not at all.

A checkpoint is written into ``step-....partial`` and renamed when its manifest (sha256 of every file) is on disk. So a
folder without ``.partial`` was complete once, and its digests say whether it still is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime.refusal import Refused

MANIFEST = "MANIFEST.json"
RUN = "run.json"
NAME = re.compile(r"^step-(\d{8})$")


def path_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not root.is_dir():
        return []
    found = (NAME.match(p.name) for p in root.iterdir() if (p / MANIFEST).is_file())
    return sorted(int(m.group(1)) for m in found if m)


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(partial: Path, final: Path, digests: dict[str, str]) -> None:
    """Write the manifest and give the folder its name; what was there under it is replaced.

    Raises:
        OSError: the disk does not take it.
    """
    manifest = {n: {"sha256": d, "bytes": (partial / n).stat().st_size} for n, d in sorted(digests.items())}
    with (partial / MANIFEST).open("w") as file:
        json.dump({"files": manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)


def broken_files(folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Files of a checkpoint that are missing or not what was written, each with the reason.

    Args:
        folder: a complete checkpoint.
        names: only these; None checks all.
    """
    listed = manifest(folder)
    broken = []
    for name in listed if names is None else names:
        path, expected = folder / name, listed[name]
        if not path.is_file():
            broken.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            broken.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif sha256_of(path) != expected["sha256"]:
            broken.append(f"{name} has another sha256 than when it was written")
    return broken


def manifest(folder: Path) -> dict[str, Any]:
    """File name -> digest and size.

    Raises:
        Refused: ``checkpoint-corrupt`` where it cannot be read.
    """
    try:
        files: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise Refused("checkpoint-corrupt", f"{folder} has no readable manifest", str(error)) from None
    return files


def clean(root: Path, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` checkpoints, and what was left half-written; returns the steps removed."""
    gone = steps(root)[:-keep]
    for step in gone:
        shutil.rmtree(path_of(root, step), ignore_errors=True)
    for leftover in root.glob("step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    return gone


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
