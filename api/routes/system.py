"""The service itself: health, readiness, metrics, examples, and sign-in links."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from api.auth import sign_in_url
from api.deps import Owner, Services, ServicesDep
from api.errors import ERROR_RESPONSES
from onboarding.examples import example_config, example_names
from workers.app import app as celery_app

router = APIRouter(tags=["system"])
CHECK_TIMEOUT_S = 2.0


class Example(BaseModel):
    """A model definition that ships with Onboard."""

    name: str
    model_type: str


class SignInLink(BaseModel):
    """A one-time address for a browser."""

    url: str


class Readiness(BaseModel):
    """What this process needs, and whether it answers."""

    ready: bool
    checks: dict[str, str]


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """The process answers; nothing else is looked at."""
    return {"status": "ok"}


def _ask_database(services: Services) -> None:
    services.store.ping()


def _ask_broker(services: Services) -> None:
    with celery_app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CHECK_TIMEOUT_S)


def _ask_storage(services: Services) -> None:
    services.artifacts.has("0" * 64)


def _probe(check: Callable[[Services], None], services: Services) -> str:
    try:
        check(services)
    except Exception as error:  # any failure of a dependency is an answer here, not a crash
        return f"{type(error).__name__}"
    return "ok"


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
def readyz(services: ServicesDep) -> JSONResponse:
    """Database, broker and storage answer within their timeouts."""
    checks = {"database": _ask_database, "broker": _ask_broker, "storage": _ask_storage}
    pool = concurrent.futures.ThreadPoolExecutor(len(checks))
    running = {name: pool.submit(_probe, check, services) for name, check in checks.items()}
    concurrent.futures.wait(running.values(), timeout=CHECK_TIMEOUT_S)
    answers = {name: future.result() if future.done() else "timeout" for name, future in running.items()}
    pool.shutdown(wait=False)
    ready = all(answer == "ok" for answer in answers.values())
    return JSONResponse(Readiness(ready=ready, checks=answers).model_dump(), 200 if ready else 503)


@router.get("/metrics", response_class=Response, responses={401: ERROR_RESPONSES[401]})
def metrics(services: ServicesDep, owner: Owner) -> Response:
    """Prometheus text format."""
    return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/examples", response_model=list[Example], responses={401: ERROR_RESPONSES[401]})
def examples(owner: Owner) -> list[Example]:
    """Model definitions that ship with Onboard."""
    return [Example(name=name, model_type=str(example_config(name)["model_type"])) for name in example_names()]


@router.post("/v1/signin-links", status_code=201, responses={401: ERROR_RESPONSES[401]})
def create_sign_in_link(services: ServicesDep, owner: Owner) -> SignInLink:
    """A fresh one-time sign-in address, for the key's owner."""
    return SignInLink(url=sign_in_url(services.store, owner, services.settings.base_url()))
