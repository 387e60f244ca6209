"""Run functions on several local processes in one gloo group. A server imports everything once and forks the ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

PATIENCE = timedelta(minutes=45)
"""The others wait while rank 0 computes what one process gives, which takes minutes on a loaded machine."""
PRELOAD = [
    "runtime.prove.proof",
    *(f"transformers.models.{n}.modeling_{n}" for n in ("qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_linear")),
]


def run_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Call ``work(*args)`` on every rank of a fresh group and return what rank 0 returned.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        start_processes(  # type: ignore[no-untyped-call]
            _rank, (ranks, folder, work, args), nprocs=ranks, start_method="forkserver"
        )
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _follow_parent(parent: int) -> None:
    """The server that forked this rank ends with the command; so must the rank."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    result = work(*args)
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.barrier()
    dist.destroy_process_group()
