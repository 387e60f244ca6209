"""Idempotency-Key: the same key and request give the stored answer; another request under the key is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onboarding.problem import Problem
from onboarding.store import Store


def once(
    store: Store,
    owner: str,
    route: str,
    key: str | None,
    body_digest: Callable[[], str],
    act: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Carry out ``act`` unless the key says that it was done before; returns its answer.

    Raises:
        Problem: the key is malformed (400), in use by a request in flight (409), or by another request (422).
    """
    if key is None:
        return act()
    if not 1 <= len(key) <= 255 or not key.isascii() or not key.isprintable():
        title = "Idempotency-Key must be 1 to 255 printable ASCII characters"
        raise Problem("invalid-idempotency-key", title, "a random UUID does", status=400)
    known = store.begin_idempotent(owner, route, key, body_digest())
    if known.state == "other_body":
        raise Problem("idempotency-key-reused", "this Idempotency-Key belongs to another request", "use a new key")
    if known.state == "in_flight":
        title = "a request with this Idempotency-Key is still being handled"
        raise Problem("request-in-flight", title, "ask again shortly", status=409, retry_after=1)
    if known.response is not None:
        return known.response
    try:
        answer = act()
    except BaseException:
        # Nothing was made: a corrected request may use the key.
        store.forget_idempotent(owner, route, key)
        raise
    store.finish_idempotent(owner, route, key, 202, answer)
    return answer
