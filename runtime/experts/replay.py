"""Recomputation that repeats the first pass exactly: routing is recorded, not decided again.

``replay_contexts`` is the ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` (non-reentrant). In the first pass
the tape records every selection of experts and every route; the recomputation reads them back. Ties in a router, or
kernels whose bits differ between two runs, then cannot change buffer shapes or choose other experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

Phase = Literal["plain", "record", "replay"]


class Tape:
    """What one checkpointed region decided, in order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.position = 0
        self.replaying = False

    def record(self, entry: Any) -> None:
        self.entries.append(entry)

    def read(self) -> Any:
        if self.position >= len(self.entries):
            raise RuntimeError("the recomputation takes a step that the first pass did not take")
        self.position += 1
        return self.entries[self.position - 1]


class _Current(threading.local):
    """Backward of a CUDA graph runs in a thread of its own, so the tape belongs to the thread."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []


_current = _Current()


def replay_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the first pass and for the recomputation of one checkpointed region."""
    tape = Tape()
    return _running(tape, replaying=False), _running(tape, replaying=True)


@contextmanager
def _running(tape: Tape, replaying: bool) -> Iterator[None]:
    tape.position = 0
    tape.replaying = replaying
    _current.tapes.append(tape)
    try:
        yield
    finally:
        _current.tapes.pop()


def current() -> Tape | None:
    """The innermost tape of this thread."""
    return _current.tapes[-1] if _current.tapes else None


def phase() -> Phase:
    """Whether this pass is outside checkpointed regions, the first pass of one, or its recomputation."""
    tape = current()
    if tape is None:
        return "plain"
    return "replay" if tape.replaying else "record"


def refuse_other_checkpoints() -> None:
    """Raise where activation checkpointing runs without ``replay_contexts``.

    Raises:
        RuntimeError: with the fix.
    """
    read = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = read(False) if read is not None and phase() == "plain" else None
    if hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", ""):
        raise RuntimeError(
            "activation checkpointing over routed experts needs context_fn=runtime.experts.replay.replay_contexts, "
            "so that the recomputation repeats the routing"
        )
