"""The application factory: ``uvicorn api.app:create_app --factory``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.middleware import Middleware

from api import errors
from api.auth import ensure_first_key, sign_in_url
from api.deps import Services
from api.metrics import Measure, Metrics
from api.routes import agents, artifacts, assets, jobs, pages, sign_in, streams, system
from api.security import Guard, allowed_hosts
from api.tail import Tailers
from onboarding.artifacts import ArtifactStore
from onboarding.settings import Settings
from onboarding.store import Store

MULTIPART_OVERHEAD = 2**20
"""Bytes that boundaries and headers of an upload may take on top of its files."""


def announce(settings: Settings, store: Store) -> None:
    """Print, once, a key that was just made, and at every start a sign-in link for the browser."""
    first = ensure_first_key(store, settings)
    if first.made:
        print(f"API key (shown once, kept in {first.path}): {first.secret}")
    print(f"sign in: {sign_in_url(store, first.owner, settings.base_url())}", flush=True)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the API and dashboard on the stores that the settings name."""
    settings = settings or Settings()
    store = Store(settings.resolved_database_url())
    metrics = Metrics(store)
    services = Services(
        settings=settings,
        store=store,
        artifacts=ArtifactStore(settings.resolved_artifacts_url()),
        tailers=Tailers(store),
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(store.migrate)
        await run_in_threadpool(announce, settings, store)
        yield
        store.close()

    app = FastAPI(
        title="Onboard",
        version="1",
        lifespan=lifespan,
        # The stock pages load scripts from elsewhere; /docs is a page of our own.
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
        middleware=[
            Middleware(Measure, metrics=metrics),
            Middleware(Guard, hosts=allowed_hosts(settings), max_body=settings.max_upload_bytes + MULTIPART_OVERHEAD),
        ],
    )
    app.state.services = services
    errors.install(app)
    for module in (jobs, agents, streams, artifacts, system, sign_in, pages, assets):
        app.include_router(module.router)
    return app
