"""Finds the newest checkpoint that is whole, and loads it into a run of any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from runtime.checkpoint import folder, remote
from runtime.checkpoint.state import State
from runtime.config import CheckpointConfig
from runtime.refusal import Refused

Report = Callable[[dict[str, Any]], None]


def find(root: Path, config: CheckpointConfig, report: Report) -> Path | None:
    """The newest checkpoint whose digests hold, on every rank the same; None where there is none at all.

    Ranks share the checking. A broken checkpoint is reported and the one before it is taken.

    Raises:
        Refused: ``checkpoint-corrupt``: there are checkpoints, and none of them is whole.
    """
    rank = dist.get_rank()
    if rank == 0 and config.upload is not None and not folder.steps(root):
        stored = remote.steps(config.upload)
        if stored:
            report({"kind": "download", "step": stored[-1], "path": config.upload})
            remote.download(config.upload, stored[-1], root)
    said: list[Any] = [folder.steps(root) if rank == 0 else None]
    dist.broadcast_object_list(said, src=0)
    reasons: list[str] = []
    for step in reversed(said[0]):
        path = folder.path_of(root, step)
        broken = _broken(path)
        if not broken:
            return path
        reasons.append(f"{path.name}: {'; '.join(broken)}")
        if rank == 0:
            report({"kind": "checkpoint-corrupt", "step": step, "why": "; ".join(broken)})
    if reasons:
        advice = f"restore the files, or remove {root} to start anew"
        raise Refused("checkpoint-corrupt", "no checkpoint is whole any more", f"{' | '.join(reasons)}; {advice}")
    return None


def read_run(checkpoint: Path) -> dict[str, Any]:
    """What the run said of itself."""
    run: dict[str, Any] = json.loads((checkpoint / folder.RUN).read_text())
    return run


def check(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model or run before anything is loaded.

    Raises:
        Refused: ``checkpoint-of-another-run`` with every difference.
    """
    saved = read_run(checkpoint)["identity"]
    if differences := _differences(saved, identity, ""):
        detail = f"{'; '.join(differences)}; use the settings it was made with, or another output folder"
        raise Refused("checkpoint-of-another-run", f"{checkpoint} was made by another run", detail)


def load(checkpoint: Path, state: State) -> None:
    """Fill the run's tensors, each rank its own parts.

    Raises:
        Refused: ``checkpoint-of-another-run`` where a tensor is missing or has another shape.
    """
    reader = FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    missing = sorted(set(state) - set(saved))
    if missing:
        detail = f"it lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        raise Refused("checkpoint-of-another-run", f"{checkpoint} does not hold what this run trains", detail)
    for name, value in state.items():
        size = getattr(saved[name], "size", None)
        if size is not None and tuple(size) != tuple(value.shape):
            detail = f"{name} is {tuple(size)} there and {tuple(value.shape)} here"
            raise Refused("checkpoint-of-another-run", f"{checkpoint} is of another model", detail)
    load_state(state, storage_reader=reader)


def _broken(path: Path) -> list[str]:
    """Each rank checks its share of the files; all get all findings."""
    try:
        names = sorted(folder.manifest(path))
        mine = names[dist.get_rank() :: dist.get_world_size()]
        found = folder.broken_files(path, mine)
    except Refused as refused:
        found = [refused.title] if dist.get_rank() == 0 else []
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return [reason for part in gathered for reason in part]


def _differences(saved: Any, now: Any, where: str) -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        names = sorted({*saved, *now})
        inner = (_differences(saved.get(n), now.get(n), f"{where}.{n}" if where else n) for n in names)
        return [d for part in inner for d in part]
    return [] if saved == now else [f"{where} was {saved!r} and is {now!r}"]
