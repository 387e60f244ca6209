"""A browser comes in through a one-time link and leaves by signing out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from api.auth import SESSION_LIFE, redeem
from api.deps import ServicesDep
from api.security import SESSION_COOKIE

router = APIRouter(include_in_schema=False)


@router.get("/signin")
def sign_in(
    request: Request, services: ServicesDep, token: Annotated[str, Query(max_length=128)], to: str = "/"
) -> RedirectResponse:
    """Exchange the link's token for a session cookie, and go to a page of ours."""
    session = redeem(services.store, token)
    # Only a path: '//host' and 'https://host' would lead away.
    target = to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
    response = RedirectResponse(target, 303)
    response.set_cookie(
        SESSION_COOKIE,
        session,
        max_age=int(SESSION_LIFE.total_seconds()),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https" or services.settings.base_url().startswith("https:"),
    )
    return response


@router.post("/signout")
def sign_out(request: Request, services: ServicesDep) -> RedirectResponse:
    """End this browser's session."""
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie:
        services.store.end_session(cookie)
    response = RedirectResponse("/", 303)
    response.delete_cookie(SESSION_COOKIE)
    return response
