"""One tailer per watched job and process: it polls the database, all streams of that job share what it finds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator

from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError

from api.views import EventView, event_view
from onboarding.pipeline import FINAL_JOB_STATES
from onboarding.store import Store

logger = logging.getLogger(__name__)

POLL_S = 0.2
BATCH = 500


class Tailer:
    """Follows the events of one job while somebody listens."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._recent: deque[EventView] = deque(maxlen=BATCH)
        self._head = -1
        self._ended = False
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.listeners = 0

    def _look(self) -> tuple[int, bool, list[EventView]]:
        """The newest number, whether the job has ended, and what is new to this tailer."""
        # The job's row first: its last_seq is set in the transaction that writes the events.
        job = self._store.get_job(self._job_id)
        head, ended = (job.last_seq, job.state in FINAL_JOB_STATES) if job else (0, True)
        if self._head < 0 or head == self._head:
            return head, ended, []
        rows = self._store.events_since(self._job_id, max(self._head, head - BATCH), BATCH)
        return head, ended, [event_view(row) for row in rows]

    async def _follow(self) -> None:
        while True:
            try:
                head, ended, fresh = await run_in_threadpool(self._look)
            except SQLAlchemyError:
                logger.warning("cannot read events of %s; trying again", self._job_id, exc_info=True)
                await asyncio.sleep(5 * POLL_S)
                continue
            if head != self._head or ended != self._ended:
                async with self._news:
                    self._recent.extend(fresh)
                    self._head, self._ended = max(head, fresh[-1].seq if fresh else 0), ended
                    self._news.notify_all()
            await asyncio.sleep(POLL_S)

    async def events(self, after: int) -> AsyncGenerator[EventView, None]:
        """Events numbered above ``after``, as they come; returns when the job has ended and all were given."""
        self.listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        try:
            while True:
                async with self._news:
                    while not (self._head > after or (self._ended and self._head >= 0)):
                        await self._news.wait()
                    ended, head = self._ended, self._head
                    batch = [event for event in self._recent if event.seq > after]
                if not batch or batch[0].seq != after + 1:
                    # Older than what the tailer keeps: read it for this listener alone.
                    rows = await run_in_threadpool(self._store.events_since, self._job_id, after, BATCH)
                    batch = [event_view(row) for row in rows]
                for event in batch:
                    yield event
                    after = event.seq
                if ended and after >= head:
                    return
        finally:
            self.listeners -= 1

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class Tailers:
    """The tailers of this process, by job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_job: dict[str, Tailer] = {}

    async def events(self, job_id: str, after: int) -> AsyncGenerator[EventView, None]:
        """Follow one job; its tailer lives as long as somebody listens."""
        tailer = self._by_job.get(job_id)
        if tailer is None:
            tailer = self._by_job[job_id] = Tailer(self._store, job_id)
        try:
            # aclosing: a client that leaves must end the inner generator now, not when it is collected
            async with contextlib.aclosing(tailer.events(after)) as events:
                async for event in events:
                    yield event
        finally:
            if tailer.listeners == 0 and self._by_job.get(job_id) is tailer:
                del self._by_job[job_id]
                await tailer.close()

    def __len__(self) -> int:
        return len(self._by_job)
