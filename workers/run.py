"""A worker process: ``python -m workers.run [--queues cpu,gpu,multi]``; ``ONBOARD_CPU_WORKERS`` steps side by side.

A Celery worker with a pool of threads, whose tasks only wait for step processes, and a sweeper beside it.
"""

from __future__ import annotations

import argparse
import sys

from onboarding.pipeline import QUEUES
from onboarding.settings import Settings
from onboarding.store import Store
from workers.app import app
from workers.environment import check_packages
from workers.supervisor import host
from workers.sweeper import Sweeper


def main(arguments: list[str] | None = None) -> None:
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
    try:
        app.worker_main(
            [
                "worker",
                "--pool=threads",
                f"--concurrency={settings.cpu_workers}",
                f"--queues={chosen.queues}",
                "--loglevel=INFO",
                "--without-gossip",
                "--without-mingle",
                "--without-heartbeat",
            ]
        )
    finally:
        sweeper.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
