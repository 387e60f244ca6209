"""Who may use the service: API keys, sign-in links, browser sessions, and remembered POSTs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlmodel import SQLModel
from ulid import ULID

from onboarding.records import ApiKey, Idempotency, utcnow
from onboarding.store.base import Database

API_KEY = SQLModel.metadata.tables["apikey"]
SIGN_IN = SQLModel.metadata.tables["signin"]
IDEMPOTENCY = SQLModel.metadata.tables["idempotency"]

KEY_PREFIX = "onb_"
IDEMPOTENCY_TTL = timedelta(hours=24)
IN_FLIGHT_TTL = timedelta(seconds=60)
"""After this long a POST without an answer is taken for dead and may be sent again."""


def secret_digest(secret: str) -> str:
    """What is stored of a random 256-bit secret: its sha256."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class IdempotencyState:
    """What is known of a POST that carries an Idempotency-Key."""

    state: Literal["new", "in_flight", "other_body", "answered"]
    """``new``: handle it, then call ``finish_idempotent`` or ``forget_idempotent``."""
    status: int | None = None
    response: dict[str, Any] | None = None
    """For ``answered``: the stored answer."""


class AccessStore(Database):
    """Only hashes of secrets are stored; a secret is returned once, by the method that makes it."""

    def create_key(self, name: str, *, ttl: timedelta | None = None) -> tuple[ApiKey, str]:
        """Make a bearer key.

        Returns:
            The record and the secret, which is not stored.
        """
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        expires = utcnow() + ttl if ttl is not None else None
        key = ApiKey(id=str(ULID()), name=name, digest=secret_digest(secret), created_at=utcnow(), expires_at=expires)
        with self.writing() as session:
            session.execute(insert(API_KEY).values(**key.model_dump()))
        return key, secret

    def authenticate(self, secret: str) -> ApiKey | None:
        """The key that belongs to a bearer secret, if it is known and has not expired."""
        digest = secret_digest(secret)
        with self.reading() as session:
            key = session.scalars(select(ApiKey).where(API_KEY.c.digest == digest)).one_or_none()
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        return None if key.expires_at is not None and key.expires_at <= utcnow() else key

    def create_link(self, owner: str, *, ttl: timedelta = timedelta(minutes=15)) -> str:
        """Make the token of a one-time sign-in link for an owner."""
        return self._sign_in("link", owner, ttl)

    def redeem(self, token: str, *, ttl: timedelta = timedelta(days=7)) -> str | None:
        """Exchange a link's token for a session token, once; None if unknown, used or expired."""
        with self.writing() as session:
            row = session.execute(
                update(SIGN_IN)
                .where(
                    SIGN_IN.c.digest == secret_digest(token),
                    SIGN_IN.c.kind == "link",
                    SIGN_IN.c.used.is_(False),
                    SIGN_IN.c.expires_at > utcnow(),
                )
                .values(used=True)
                .returning(SIGN_IN.c.owner)
            ).one_or_none()
        return None if row is None else self._sign_in("session", row.owner, ttl)

    def session_owner(self, token: str) -> str | None:
        """The owner of a browser session; None if unknown or expired."""
        query = select(SIGN_IN.c.owner).where(
            SIGN_IN.c.digest == secret_digest(token), SIGN_IN.c.kind == "session", SIGN_IN.c.expires_at > utcnow()
        )
        with self.reading() as session:
            owner: str | None = session.execute(query).scalar()
            return owner

    def end_session(self, token: str) -> None:
        """Sign out."""
        with self.writing() as session:
            session.execute(delete(SIGN_IN).where(SIGN_IN.c.digest == secret_digest(token)))

    def _sign_in(self, kind: str, owner: str, ttl: timedelta) -> str:
        token = secrets.token_urlsafe(32)
        now = utcnow()
        with self.writing() as session:
            session.execute(delete(SIGN_IN).where(SIGN_IN.c.expires_at <= now))
            session.execute(
                insert(SIGN_IN).values(
                    digest=secret_digest(token), kind=kind, owner=owner, expires_at=now + ttl, used=False
                )
            )
        return token

    def begin_idempotent(self, owner: str, route: str, key: str, body_digest: str) -> IdempotencyState:
        """Reserve an Idempotency-Key for a POST, or say what became of the earlier one.

        Args:
            owner: keys are scoped by owner and route.
            route: the route's template, e.g. ``POST /v1/jobs``.
            key: the header's value.
            body_digest: sha256 of the request body.
        """
        identity = {"owner": owner, "route": route, "idempotency_key": key}
        now = utcnow()
        unanswered = IDEMPOTENCY.c.status.is_(None) & (IDEMPOTENCY.c.created_at <= now - IN_FLIGHT_TTL)
        stale = unanswered | (IDEMPOTENCY.c.created_at <= now - IDEMPOTENCY_TTL)
        try:
            with self.writing() as session:
                session.execute(delete(IDEMPOTENCY).where(stale))
                session.execute(insert(IDEMPOTENCY).values(**identity, body_digest=body_digest, created_at=now))
            return IdempotencyState("new")
        except IntegrityError:
            with self.reading() as session:
                known = session.scalars(select(Idempotency).filter_by(**identity)).one_or_none()
        if known is None:  # forgotten in between: the client may send it again
            return IdempotencyState("in_flight")
        if known.body_digest != body_digest:
            return IdempotencyState("other_body")
        if known.status is None:
            return IdempotencyState("in_flight")
        return IdempotencyState("answered", known.status, known.response)

    def finish_idempotent(self, owner: str, route: str, key: str, status: int, response: dict[str, Any]) -> None:
        """Store the answer of a POST that :meth:`begin_idempotent` called new."""
        with self.writing() as session:
            session.execute(
                update(IDEMPOTENCY)
                .filter_by(owner=owner, route=route, idempotency_key=key)
                .values(status=status, response=response)
            )

    def forget_idempotent(self, owner: str, route: str, key: str) -> None:
        """The POST was not carried out: the key may be used again."""
        with self.writing() as session:
            session.execute(delete(IDEMPOTENCY).filter_by(owner=owner, route=route, idempotency_key=key))
