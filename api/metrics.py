"""Prometheus metrics: requests by route template, jobs and stages by duration, and how deep the queues are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func
from sqlalchemy.orm import Session
from sqlmodel import col, select
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onboarding.records import Job, Step, utcnow
from onboarding.store import Store

HOURS_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200)
OVERLAP = timedelta(seconds=60)
"""Rows that committed late are still counted if they ended this long before the last scrape."""


class Metrics:
    """The registry of one application."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("onboard_http_requests", "Requests", labels, registry=self.registry)
        self.latency = Histogram(
            "onboard_http_request_seconds", "Time to the first byte", ("method", "route"), registry=self.registry
        )
        self.registry.register(JobCollector(store))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(method, route, str(status)).inc()
        self.latency.labels(method, route).observe(seconds)


class JobCollector(Collector):
    """Reads the database at each scrape: gauges as they are, histograms from what ended since the last one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._since: datetime = utcnow()
        self._seen: dict[tuple[str, object], datetime] = {}
        self._stages = Histogram(
            "onboard_stage_seconds", "Time of a step", ("stage", "state"), buckets=HOURS_BUCKETS, registry=None
        )
        self._jobs = Histogram("onboard_job_seconds", "Time of a job", ("state",), buckets=HOURS_BUCKETS, registry=None)

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing ahead of time: registering must not query the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything, after bringing the histograms up to date (which is why they are not registered themselves)."""
        with self._store.reading() as session:
            self._observe_ended(session)
            yield from self._gauges(session)
        yield from self._stages.collect()
        yield from self._jobs.collect()

    def _gauges(self, session: Session) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("onboard_jobs", "Jobs by state", labels=["state"])
        for state, count in session.execute(select(Job.state, func.count()).group_by(Job.state)):
            jobs.add_metric([state], count)
        depth = GaugeMetricFamily("onboard_queue_depth", "Steps waiting or running", labels=["queue", "state"])
        live = select(Step.queue, Step.state, func.count()).where(col(Step.state).in_(("ready", "running")))
        for queue, state, count in session.execute(live.group_by(Step.queue, Step.state)):
            depth.add_metric([queue, state], count)
        age = GaugeMetricFamily("onboard_oldest_ready_seconds", "Age of the oldest waiting step", labels=["queue"])
        ready = select(Step.queue, func.min(Step.created_at)).where(Step.state == "ready").group_by(Step.queue)
        for queue, oldest in session.execute(ready):
            age.add_metric([queue], max(0.0, (utcnow() - oldest).total_seconds()))
        yield from (jobs, depth, age)

    def _observe_ended(self, session: Session) -> None:
        horizon = self._since - OVERLAP
        self._seen = {key: at for key, at in self._seen.items() if at > horizon}
        newest = self._since
        for step in session.scalars(select(Step).where(col(Step.finished_at) > horizon)):
            if step.started_at and step.finished_at and self._is_new(("step", step.id), step.finished_at):
                self._stages.labels(step.stage, step.state).observe(
                    (step.finished_at - step.started_at).total_seconds()
                )
                newest = max(newest, step.finished_at)
        for job in session.scalars(select(Job).where(col(Job.finished_at) > horizon)):
            if job.started_at and job.finished_at and self._is_new((job.id, job.finished_at), job.finished_at):
                self._jobs.labels(job.state).observe((job.finished_at - job.started_at).total_seconds())
                newest = max(newest, job.finished_at)
        self._since = newest

    def _is_new(self, key: tuple[str, object], at: datetime) -> bool:
        new = key not in self._seen
        self._seen[key] = at
        return new


class Measure:
    """ASGI middleware: counts requests by route template, never by raw path."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure up to the response's first byte: an event stream would otherwise count its whole life."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "(unmatched)")
                self.metrics.observe(scope["method"], route, message["status"], time.perf_counter() - begun)
            await send(message)

        await self.app(scope, receive, send_measured)
