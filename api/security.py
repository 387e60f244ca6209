"""What guards every request and answer: Host allow-list, size cap, Origin on unsafe methods with a cookie, headers."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import respond
from onboarding.problem import Problem
from onboarding.settings import Settings

CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
DOWNLOAD_CSP = "default-src 'none'; sandbox"
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SESSION_COOKIE = "onboard_session"


def host_name(host: str) -> str:
    """The name in a Host header, lower case, without port and brackets; empty when malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def allowed_hosts(settings: Settings) -> frozenset[str]:
    """Names this service answers to. A wildcard bind adds no name: it must be listed, against DNS rebinding."""
    names = {"localhost", "127.0.0.1", "::1", *(name.lower() for name in settings.allowed_hosts)}
    if settings.public_url:
        names.add((urlsplit(settings.public_url).hostname or "").lower())
    try:
        if not ipaddress.ip_address(settings.host).is_unspecified:
            names.add(settings.host)
    except ValueError:
        names.add(settings.host.lower())
    return frozenset(names - {""})


def origin_allowed(headers: Headers) -> bool:
    """Whether a request that carries the session cookie comes from one of our own pages.

    The scheme is not compared: behind a TLS proxy the page is https and this process sees http.
    """
    origin = headers.get("origin", "")
    return bool(origin) and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


class Guard:
    """ASGI middleware (not BaseHTTPMiddleware, which would buffer event streams).

    Args:
        app: the application behind it.
        hosts: names accepted in the Host header.
        max_body: bytes that a request's body may have.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], max_body: int) -> None:
        self.app = app
        self.hosts = hosts
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what must not pass, and add the headers to whatever is answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        received = 0

        async def receive_capped() -> Message:
            # Bytes are counted as they come: Content-Length may lie or be missing.
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body:
                raise self._too_large()
            return message

        problem = self._refusal(scope)
        if problem is not None:
            await respond(Request(scope), problem)(scope, receive, send_guarded)
            return
        await self.app(scope, receive_capped, send_guarded)

    def _too_large(self) -> Problem:
        title = f"the request's body is over {self.max_body} bytes"
        detail = "the definition is enough: leave weights out"
        return Problem("too-large", title, detail, status=413, limit=self.max_body)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if host_name(headers.get("host", "")) not in self.hosts:
            return Problem(
                "host-not-allowed",
                "this service does not answer to that host name",
                "add the name to ONBOARD_ALLOWED_HOSTS",
                status=421,
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body:
            return self._too_large()
        by_cookie = SESSION_COOKIE in headers.get("cookie", "") and "authorization" not in headers
        if by_cookie and scope["method"] not in SAFE_METHODS and not origin_allowed(headers):
            return Problem(
                "cross-origin",
                "the request does not come from this service's own pages",
                "unsafe methods with a session cookie need a matching Origin header",
                status=403,
            )
        return None
