"""Errors that a user sees: what is wrong, where, and what to do. Rendered as problem+json (RFC 9457)."""

from __future__ import annotations

from typing import Any

PROBLEM_BASE = "https://onboard.invalid/problems/"
"""Problem types are stable identifiers, not addresses: ``.invalid`` never resolves (RFC 2606)."""


class Problem(Exception):
    """A refusal or failure with a stable type.

    Args:
        kind: last part of the ``type`` URI, e.g. ``config-field-missing``; stable across versions.
        title: one line, what is wrong.
        detail: where, and what to do about it.
        status: HTTP status when the API answers with it.
        extra: further members (``field``, ``line``, ``limit`` ...), JSON values only.
    """

    def __init__(self, kind: str, title: str, detail: str = "", *, status: int = 422, **extra: Any) -> None:
        super().__init__(title)
        self.kind = kind
        self.title = title
        self.detail = detail
        self.status = status
        self.extra = extra

    def to_dict(self, instance: str | None = None) -> dict[str, Any]:
        """The problem+json members."""
        body: dict[str, Any] = {
            "type": PROBLEM_BASE + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }
        if instance is not None:
            body["instance"] = instance
        return body

    def facts(self) -> dict[str, str]:
        """The further members in words, for people; those that are empty are left out."""
        hidden = ("errors", "retry_after")
        return {n: _in_words(v) for n, v in self.extra.items() if n not in hidden and v not in ("", None, [], {})}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Problem:
        """Rebuild a problem that was stored or received."""
        known = {"type", "title", "status", "detail", "instance"}
        extra = {k: v for k, v in body.items() if k not in known}
        kind = str(body.get("type", "")).removeprefix(PROBLEM_BASE) or "unknown"
        return cls(
            kind, str(body.get("title", "")), str(body.get("detail", "")), status=int(body.get("status", 500)), **extra
        )


def _in_words(value: Any) -> str:
    """A JSON value as a line: what a mapping holds by name, lists of lists by their length."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_in_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return str(len(value)) if any(isinstance(v, list | dict) for v in value) else "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


class StageSkipped(Exception):
    """Raised by a stage that has nothing it can honestly do here (no GPU); the reason is shown and stored."""
