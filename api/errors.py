"""Every refusal is problem+json (RFC 9457) with a stable ``type``; browsers get the same facts as a page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from onboarding.problem import Problem

logger = logging.getLogger(__name__)

KINDS = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "too-large",
    415: "unsupported-media-type",
    422: "invalid-request",
}


class ProblemDocument(BaseModel):
    """The shape of every error body, for the OpenAPI description."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemDocument, "content": {"application/problem+json": {}}}
    for status in (401, 403, 404, 409, 413, 415, 422)
}


def wants_page(request: Request) -> bool:
    """Whether the answer goes to a person's browser: a page route, asked for as HTML."""
    return not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", "")


def respond(request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Render a problem as problem+json, or as a page for a browser."""
    body = problem.to_dict(instance=request.url.path)
    if wants_page(request):
        from api.dashboard.render import page

        return page(request, "error.html", {"problem": body}, status=problem.status, headers=headers)
    return JSONResponse(body, problem.status, dict(headers or {}), media_type="application/problem+json")


def unauthorized(detail: str = "send 'Authorization: Bearer <key>', or sign in through the printed link") -> Problem:
    """The one refusal of a request without valid credentials."""
    return Problem("unauthorized", "no valid credentials", detail, status=401)


def not_found(what: str) -> Problem:
    """Absent and foreign objects get the same answer, so that ids cannot be probed."""
    return Problem("not-found", f"no such {what}", "it does not exist, or it belongs to another key", status=404)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="onboard"'
    if "retry_after" in error.extra:
        headers["Retry-After"] = str(error.extra["retry_after"])
    return respond(request, error, headers)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase.lower()
    kind = KINDS.get(error.status_code, "http-error")
    detail = error.detail if error.detail.lower() != title else f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(allowed_methods(request)))
    return respond(request, Problem(kind, title, detail, status=error.status_code), headers)


def allowed_methods(request: Request) -> set[str]:
    """Methods of all routes with this path: the framework names only those of the first."""
    methods: set[str] = set()
    for context in iter_route_contexts(request.app.routes):
        if context.path is not None and compile_path(context.path)[0].match(request.url.path):
            methods |= set(context.methods or ())
    return methods


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"field": ".".join(str(part) for part in item["loc"][1:]) or str(item["loc"][0]), "message": item["msg"]}
        for item in error.errors()
    ]
    first = errors[0]
    problem = Problem(
        "invalid-request",
        f"{first['field']}: {first['message']}",
        f"{len(errors)} invalid field(s); see errors",
        errors=errors,
        field=first["field"],
    )
    return respond(request, problem)


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.exception("unhandled error in %s %s", request.method, request.url.path, exc_info=error)
    problem = Problem("internal-error", "the service failed", "the cause is in the service's log", status=500)
    return respond(request, problem)


def install(app: FastAPI) -> None:
    """Register the handlers on ``app``."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_crash)
