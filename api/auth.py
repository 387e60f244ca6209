"""Who is asking: bearer keys for programs, a one-time link and a session cookie for browsers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from fastapi import Request
from ulid import ULID

from api.errors import unauthorized
from api.security import SESSION_COOKIE
from onboarding.problem import Problem
from onboarding.records import ApiKey
from onboarding.settings import Settings
from onboarding.store import Store
from onboarding.store.access import KEY_PREFIX, secret_digest

LINK_LIFE = timedelta(hours=1)
SESSION_LIFE = timedelta(days=7)


@dataclass(frozen=True)
class FirstKey:
    """The key that the command line uses, and whether this start made it."""

    owner: str
    secret: str
    made: bool
    path: Path | None


def register(store: Store, secret: str, name: str) -> str:
    """Make sure that this database knows a key that exists already; returns its owner id."""
    known = store.authenticate(secret)
    if known is not None:
        return known.id
    key = ApiKey(id=str(ULID()), name=name, digest=secret_digest(secret))
    with store.writing() as session:
        session.add(key)
    return key.id


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, at no moment readable to others."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
    aside.replace(path)


def ensure_first_key(store: Store, settings: Settings) -> FirstKey:
    """Make sure that the command line's key works here; make one at the very first start.

    The key comes from ``settings.api_key``, else from the key file, else it is made and stored there (0600).
    """
    if settings.api_key is not None:
        secret = settings.api_key.get_secret_value()
        return FirstKey(register(store, secret, "configured"), secret, False, None)
    path = settings.key_file.expanduser()
    secret = path.read_text().strip() if path.exists() else ""
    if secret.startswith(KEY_PREFIX):
        return FirstKey(register(store, secret, "first"), secret, False, path)
    key, secret = store.create_key("first")
    write_private(path, secret)
    return FirstKey(key.id, secret, True, path)


def sign_in_url(store: Store, owner: str, base_url: str) -> str:
    """A one-time address that signs a browser in as ``owner``."""
    return f"{base_url}/signin?token={store.create_link(owner, ttl=LINK_LIFE)}"


def redeem(store: Store, token: str) -> str:
    """Exchange a link's token for a session token, once.

    Raises:
        Problem: unknown, used or expired (401).
    """
    session = store.redeem(token, ttl=SESSION_LIFE)
    if session is None:
        title = "this sign-in link was used or has expired"
        raise Problem("sign-in-link-used", title, "get a fresh one with: onboard signin", status=401)
    return session


def authenticate(request: Request, store: Store) -> str:
    """The owner id behind a request. A bearer header decides alone: a bad key never falls back to a cookie.

    Raises:
        Problem: no valid credentials (401).
    """
    owner: str | None = None
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        key = store.authenticate(secret.strip()) if scheme.lower() == "bearer" else None
        owner = key.id if key is not None else None
    elif cookie := request.cookies.get(SESSION_COOKIE):
        owner = store.session_owner(cookie)
    if owner is None:
        raise unauthorized()
    return owner
