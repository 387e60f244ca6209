"""How a call of a language model can fail, by what to do about it."""

from __future__ import annotations


class LlmError(Exception):
    """Base: the call brought no usable answer."""


class Transient(LlmError):
    """Worth asking again: connection, time-out, 429, 5xx, a body that is no JSON.

    Args:
        retry_after_s: what the server asks to wait, if it says.
        maybe_paid: the server may have worked and charged for it (a time-out, a torn answer).
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, maybe_paid: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.maybe_paid = maybe_paid


class Rejected(LlmError):
    """The endpoint refuses the request itself (4xx): asking again in the same way brings the same."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ModeUnsupported(Rejected):
    """The endpoint does not serve this way of asking for a structured answer."""


class ContextTooLong(Rejected):
    """The prompt does not fit the model's context."""


class Refused(LlmError):
    """The model declines to answer."""


class Invalid(LlmError):
    """There is an answer, and it is not what was asked for (no JSON, wrong schema, cut off)."""
