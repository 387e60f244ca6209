"""Writes checkpoints with torch's DCP, behind the training steps where it may, and keeps the last few."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from runtime.checkpoint import folder, remote
from runtime.checkpoint.state import State, size_of, staged
from runtime.config import CheckpointConfig

Report = Callable[[dict[str, Any]], None]


class Writer:
    """One per run and rank; every call is made by all ranks after the same step.

    A write that fails (a full disk) leaves the checkpoints before it as they are; the run hears of it through
    ``report`` and goes on.

    Args:
        root: folder of the checkpoints, seen by all ranks.
        config: when and how many.
        report: called with what became of a checkpoint, from the writing thread.
    """

    def __init__(self, root: Path, config: CheckpointConfig, report: Report) -> None:
        self.root, self.config, self._report = root, config, report
        self._group = dist.new_group(backend="gloo")  # its own: the main group's collectives go on meanwhile
        self._rank = dist.get_rank()
        self._thread: threading.Thread | None = None
        self.failed: str | None = None
        """Why the newest write failed, if it did."""
        if self._rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            folder.clean(root, config.keep)
        dist.barrier(self._group)

    def save(self, step: int, state: State, run: dict[str, Any], *, wait: bool = False) -> None:
        """Save a step.

        Args:
            step: its number.
            state: from :func:`runtime.checkpoint.state.collect`; copied to the host before this returns.
            run: everything else that going on needs, plain data.
            wait: do not return before it is on disk.
        """
        self.wait()
        if self.config.asynchronous and not wait:
            copy = staged(state)
            self._thread = threading.Thread(target=self._write, args=(step, copy, run), name="checkpoint")
            self._thread.start()
        else:
            self._write(step, state, run)

    def wait(self) -> None:
        """Until the write that is under way has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: State, run: dict[str, Any]) -> None:
        final = folder.path_of(self.root, step)
        partial = final.with_suffix(".partial")
        try:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier(self._group)
            failure = self._files(partial, state, run)
            if failure is None and self._rank == 0:
                failure = self._commit(partial, final)
            failure = self._any(failure)
        except Exception as error:  # another rank is gone: torchrun ends this one too
            failure = f"{type(error).__name__}: {error}"
        self.failed = failure
        if self._rank != 0:
            return
        if failure is not None:
            shutil.rmtree(partial, ignore_errors=True)
            self._report({"kind": "checkpoint-failed", "step": step, "why": failure})
            return
        self._report({"kind": "checkpoint", "step": step, "path": str(final)})
        if self.config.upload is not None:
            self._upload(final, step)
        folder.clean(self.root, self.config.keep)

    def _files(self, partial: Path, state: State, run: dict[str, Any]) -> str | None:
        """Write this rank's files and gather all digests on rank 0; gives the reason where any rank failed."""
        failure = None
        self._digests: dict[str, str] = {}
        try:
            writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
            save(state, storage_writer=writer, process_group=self._group)
            if self._rank == 0:
                (partial / folder.RUN).write_text(json.dumps(run))
            mine = [p for p in partial.glob("*") if p.name.startswith(f"__{self._rank}_")]
            if self._rank == 0:
                mine += [partial / ".metadata", partial / folder.RUN]
            self._digests = {p.name: folder.sha256_of(p) for p in mine}
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            failure = f"rank {rank}: {type(cause).__name__}: {cause}"
        except OSError as error:
            failure = f"rank {self._rank}: {type(error).__name__}: {error}"
        if failure is not None:
            failure += _disk_words(self.root, size_of(state))
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, (failure, self._digests), self._group)
        self._digests = {name: digest for _, part in gathered for name, digest in part.items()}
        return next((f for f, _ in gathered if f is not None), None)

    def _commit(self, partial: Path, final: Path) -> str | None:
        try:
            folder.commit(partial, final, self._digests)
        except OSError as error:
            return f"rank 0: {type(error).__name__}: {error}"
        return None

    def _any(self, failure: str | None) -> str | None:
        """What rank 0 says."""
        said = [failure]
        dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def _upload(self, final: Path, step: int) -> None:
        assert self.config.upload is not None
        try:
            remote.upload(final, self.config.upload, self.config.keep)
            self._report({"kind": "upload", "step": step, "path": self.config.upload})
        except Exception as error:  # every store has its own errors; the local checkpoint is there
            self._report({"kind": "upload-failed", "step": step, "why": f"{type(error).__name__}: {error}"})


def _disk_words(root: Path, wanted: int) -> str:
    """Torch's own writer says of a full disk only that a position is unexpected."""
    free = shutil.disk_usage(root).free
    return f" (the disk is full: {free} bytes are free, {wanted} are wanted)" if free < wanted else ""
