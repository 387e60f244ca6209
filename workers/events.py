"""Events of a running step: collected in memory, stored in batches by one small thread."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from sqlalchemy.exc import OperationalError

from onboarding.store import NewEvent, Store

FLUSH_S = 0.1
BATCH = 50
PATIENCE_S = 30.0
"""How long events wait for a database that is busy or away before the step fails."""


def json_safe(value: Any) -> Any:
    """Plain JSON: databases refuse NaN and infinities as numbers, so they become text that a float field reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


class EventWriter:
    """Stores a step's events every 100 ms or 50 rows; of the progress events in a batch only the last is kept."""

    def __init__(self, store: Store, job_id: str, stage: str, key: str) -> None:
        self.store = store
        self.job_id, self.stage, self.key = job_id, stage, key
        self.waiting: list[NewEvent] = []
        self.error: BaseException | None = None
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="events", daemon=True)
        self.thread.start()

    def emit(self, kind: str, **data: Any) -> None:
        """Take one event.

        Raises:
            BaseException: what kept the thread from storing earlier ones.
        """
        event = NewEvent(kind=kind, stage=self.stage, key=self.key, data=json_safe(data))
        with self.changed:
            if self.error is not None:
                raise self.error
            self.waiting.append(event)
            if len(self.waiting) >= BATCH:
                self.changed.notify()

    def close(self) -> None:
        """Store what is left and stop.

        Raises:
            BaseException: what kept the thread from storing events.
        """
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or len(self.waiting) >= BATCH, timeout=FLUSH_S)
                batch, self.waiting = self.waiting, []
                closing = self.closing
            try:
                self._store(batch)
            except BaseException as error:
                with self.changed:
                    self.error = error
                return
            if closing:
                return

    def _store(self, batch: list[NewEvent]) -> None:
        last_progress = max((i for i, event in enumerate(batch) if event.kind == "progress"), default=-1)
        rows = [event for i, event in enumerate(batch) if event.kind != "progress" or i == last_progress]
        deadline = time.monotonic() + PATIENCE_S
        while rows:
            try:
                self.store.append_events(self.job_id, rows)
                return
            except OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
