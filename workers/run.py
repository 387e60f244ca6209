"""A worker process: ``python -m workers.run [--queues cpu,gpu,multi]``; ``ONBOARD_CPU_WORKERS`` steps side by side.

A Celery worker with a pool of threads, whose tasks only wait for step processes, and a sweeper beside it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from typing import NoReturn

from onboarding.pipeline import QUEUES
from onboarding.settings import Settings
from onboarding.store import Store
from workers.app import app
from workers.environment import check_packages
from workers.supervisor import host
from workers.sweeper import Sweeper


def main(arguments: list[str] | None = None) -> NoReturn:
    """Serve queues until told to stop (SIGTERM, SIGINT): then running steps are ended and given back."""
    parser = argparse.ArgumentParser(prog="python -m workers.run", description="Runs the steps of jobs.")
    parser.add_argument("--queues", default=",".join(QUEUES), help="comma-separated (default: all)")
    chosen = parser.parse_args(arguments)
    check_packages()
    settings = Settings()
    store = Store(settings.resolved_database_url())
    store.migrate()
    host().start()
    sweeper = Sweeper(store, settings)
    sweeper.start()
    code: str | int | None = 1
    try:
        code = app.worker_main(worker_arguments(chosen.queues, settings.cpu_workers))
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    sweeper.stop()
    logging.shutdown()
    # Taking the interpreter apart costs a second that a service which must be down in two does not have, and nothing
    # depends on it: all state is in the database.
    os._exit(code if isinstance(code, int) else 0)


def worker_arguments(queues: str, side_by_side: int) -> list[str]:
    """Command line of the Celery worker."""
    return [
        "worker",
        "--pool=threads",
        f"--concurrency={side_by_side}",
        f"--queues={queues}",
        "--loglevel=INFO",
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
