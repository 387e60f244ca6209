"""The Celery application and its only message: a hint that a step may be ready. Free of torch.

Messages carry no state: losing or repeating one changes nothing, because a step is claimed in the database and the
sweeper sends hints again. So there is no result backend, no late acknowledgement, no chord and no retry.
"""

from __future__ import annotations

import logging

from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import ChannelError, OperationalError

from onboarding.pipeline import QUEUES
from onboarding.settings import Settings
from onboarding.store import Store
from workers.environment import clean_environment

clean_environment()
log = logging.getLogger(__name__)

ADVANCE = "workers.advance"
"""Name of the task; arguments: step id, queue."""
VISIBILITY_TIMEOUT_S = 3600
"""Has no effect on correctness: messages are acknowledged when they are taken."""
POLLING_S = 0.2
"""How long one wait at the broker lasts: a stopping worker has to sit out the present one."""


def make_app(settings: Settings) -> Celery:
    """The application on the broker that the settings name."""
    app = Celery("onboard", broker=settings.resolved_broker_url(), include=["workers.supervisor"])
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in QUEUES],
        task_create_missing_queues=False,
        task_default_queue=QUEUES[0],
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=2,
        broker_transport_options={
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            "polling_interval": POLLING_S,
            "socket_connect_timeout": 2,
            # Applies to senders: a hint is dropped, not waited for, when the broker is away.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0,
        },
    )
    return app


app = make_app(Settings())


def send(step_id: int, queue: str) -> bool:
    """Send one hint; False if the broker is away (the sweeper will send it again)."""
    try:
        app.send_task(ADVANCE, args=[step_id, queue], queue=queue, retry=False)
    except (OperationalError, OSError) as error:
        log.warning("no hint for step %s: %s", step_id, error)
        return False
    return True


def hint(store: Store, job_id: str) -> bool:
    """Send a hint for each ready step of a job, best effort: call it after ``create_job`` and ``retry``.

    Returns:
        Whether the broker took them all. A broker that is away raises nothing: the sweeper sends them later.
    """
    steps = [step for step in store.steps(job_id) if step.state == "ready"]
    return all(send(step.id, step.queue) for step in steps if step.id is not None)


def waiting(queue: str) -> int:
    """Number of hints that wait in a queue.

    Raises:
        kombu.exceptions.OperationalError: the broker is away.
    """
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=2)
        try:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)
        except ChannelError:  # an empty queue is no queue to this broker
            return 0
