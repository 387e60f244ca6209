"""Heartbeats of a rank, and the end of a rank that hangs.

Training calls :meth:`Watchdog.progress`. A thread writes a heartbeat file every few seconds; when there was no progress
for too long it writes the stack of every thread beside it and ends the process, so that torchrun starts all ranks again
from the last checkpoint. It runs while the main thread waits inside a collective; a whole process that is stopped
(SIGSTOP) is noticed by the others, which wait for it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

HUNG = 75
"""Exit status of a rank that ended itself for want of progress (EX_TEMPFAIL: try again)."""


class Watchdog:
    """Watches the process that it is made in.

    Args:
        folder: for ``rank-N.json`` heartbeats and ``rank-N.stacks.txt``.
        rank: of this process.
        hang_s: seconds without progress that count as a hang; 0 never ends the process.
        heartbeat_s: seconds between heartbeats.
    """

    def __init__(self, folder: Path, rank: int, *, hang_s: float, heartbeat_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.beat_file = folder / f"rank-{rank}.json"
        self.stack_file = folder / f"rank-{rank}.stacks.txt"
        self.hang_s, self.heartbeat_s = hang_s, heartbeat_s
        self._last = time.monotonic()
        self._what = "starting"
        self._step = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self._beat("ended" if error is None else f"ended by {type(error).__name__}")

    def progress(self, step: int, what: str) -> None:
        """Something was completed; ``what`` begins now."""
        self._last, self._step, self._what = time.monotonic(), step, what

    def silence(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._last

    def _watch(self) -> None:
        every = min(self.heartbeat_s, self.hang_s / 4) if self.hang_s else self.heartbeat_s
        while not self._end.wait(every):
            self._beat(self._what)
            if self.hang_s and self.silence() > self.hang_s:
                self._give_up()

    def _beat(self, what: str) -> None:
        beat = {"pid": os.getpid(), "time": time.time(), "step": self._step, "doing": what, "silence": self.silence()}
        aside = self.beat_file.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(beat))
            os.replace(aside, self.beat_file)
        except OSError:
            pass  # a full disk must not end the run

    def _give_up(self) -> None:
        message = f"no progress for {self.silence():.0f} s at step {self._step} ({self._what}); all stacks follow\n"
        for target in (self.stack_file, None):
            try:
                with target.open("w") if target else os.fdopen(os.dup(sys.stderr.fileno()), "w") as file:
                    file.write(message)
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            except (OSError, ValueError):
                continue
        os._exit(HUNG)
