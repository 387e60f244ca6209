"""Checkpoints in an object store, through fsspec: the manifest goes last, so what has one is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec

from runtime.checkpoint import folder


def upload(checkpoint: Path, address: str, keep: int) -> None:
    """Copy a checkpoint to ``address/<its name>`` and remove all but the newest ``keep`` there."""
    fs, root = fsspec.core.url_to_fs(address)
    target = f"{root.rstrip('/')}/{checkpoint.name}"
    names = [p.name for p in sorted(checkpoint.iterdir()) if p.name != folder.MANIFEST]
    fs.makedirs(target, exist_ok=True)
    for name in [*names, folder.MANIFEST]:
        fs.put_file(str(checkpoint / name), f"{target}/{name}")
    for step in steps(address)[:-keep]:
        fs.rm(f"{root.rstrip('/')}/step-{step:08d}", recursive=True)


def steps(address: str) -> list[int]:
    """Steps of the complete checkpoints at an address, ascending."""
    fs, root = fsspec.core.url_to_fs(address)
    fs.invalidate_cache()
    names = [p.rstrip("/").rpartition("/")[2] for p in (fs.ls(root, detail=False) if fs.exists(root) else [])]
    found = [folder.NAME.match(n) for n in names if fs.exists(f"{root.rstrip('/')}/{n}/{folder.MANIFEST}")]
    return sorted(int(m.group(1)) for m in found if m)


def download(address: str, step: int, root: Path) -> Path:
    """Fetch one checkpoint; it appears under ``root`` whole or not at all."""
    fs, base = fsspec.core.url_to_fs(address)
    source = f"{base.rstrip('/')}/step-{step:08d}"
    final = folder.path_of(root, step)
    partial = final.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    listed: dict[str, Any] = json.loads(fs.cat_file(f"{source}/{folder.MANIFEST}"))["files"]
    for name in listed:
        fs.get_file(f"{source}/{name}", str(partial / name))
    folder.commit(partial, final, {n: v["sha256"] for n, v in listed.items()})
    return final
