"""The sweeper: makes up for lost hints and dead runners. One thread in every worker; several do no harm."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError

from onboarding.settings import Settings
from onboarding.store import Store
from workers.app import send, waiting

log = logging.getLogger(__name__)

YOUNG_S = 1.0
"""A step younger than this still has its first hint on its way."""
MOST_HINTS = 100
"""A queue is topped up to at most so many hints: enough for every worker to find something."""


class Sweeper(threading.Thread):
    """Every ``settings.sweep_s`` seconds: take over expired leases, then top the queues up with hints.

    A queue gets only as many hints as it lacks for its ready steps, so that a long wait does not fill it. Neither a
    broker nor a database that is away stops the sweeper: it tries again at its next turn.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        super().__init__(name="sweeper", daemon=True)
        self.store = store
        self.every_s = settings.sweep_s
        self.stopping = threading.Event()

    def run(self) -> None:
        """Sweep until stopped."""
        while not self.stopping.wait(self.every_s):
            try:
                self.sweep()
            except SQLAlchemyError as error:
                log.warning("the database did not answer: %s", error)
            except (OperationalError, OSError) as error:
                log.warning("the broker did not answer: %s", error)

    def stop(self) -> None:
        """End after the present turn."""
        self.stopping.set()

    def sweep(self) -> int:
        """One turn.

        Returns:
            The number of hints sent.
        """
        for step in self.store.take_over_expired():
            log.info("took over step %s (%s %s), takeover %d", step.id, step.stage, step.key, step.takeovers)
        ready: dict[str, list[int]] = defaultdict(list)
        for step in self.store.ready_steps(older_than_s=YOUNG_S):
            assert step.id is not None
            ready[step.queue].append(step.id)
        sent = 0
        for queue, ids in ready.items():
            lacking = max(0, min(len(ids), MOST_HINTS) - waiting(queue))
            sent += sum(send(step_id, queue) for step_id in ids[:lacking])
        return sent
