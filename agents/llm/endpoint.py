"""One OpenAI-compatible endpoint: sends one request body, and sorts what comes back by what to do about it.

No retries here and none in the SDK: :mod:`agents.llm.caller` retries, once, for everyone. The key is in the SDK's
header only; whatever text leaves this module has it struck out.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from agents.llm.errors import ContextTooLong, LlmError, ModeUnsupported, Rejected, Transient
from onboarding.settings import LlmSettings

CONNECT_S = 10.0
_TOO_LONG = ("context_length_exceeded", "context length", "maximum context", "context window", "too many tokens")
LIMITS = ("max_tokens", "max_completion_tokens")
"""Names of the limit of an answer's length: the one that every server knows, and the one that newer ones want."""
_ABOUT_MODES = ("response_format", "schema", "json_object", "tool_choice", "tools", "grammar", "structured")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the endpoint answered."""

    message: dict[str, Any]
    finish_reason: str | None
    tokens_in: int
    tokens_cached: int
    tokens_out: int
    model: str
    seconds: float


class Sender(Protocol):
    """Sends a chat completion's body and returns the decoded completion."""

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]: ...


class Endpoint:
    """Asks one endpoint.

    Args:
        settings: address, model, key, time-out.
        send: what carries the body; the OpenAI SDK by default (cassettes and tests put their own here).
    """

    def __init__(self, settings: LlmSettings, send: Sender | None = None) -> None:
        self.settings = settings
        self._send = send or _sdk(settings)
        self._limit = LIMITS[0]

    def ask(self, messages: list[dict[str, Any]], extra: dict[str, Any], max_tokens: int) -> Reply:
        """One completion.

        Raises:
            Transient, Rejected (or one of its kinds): see :mod:`agents.llm.errors`.
        """
        body: dict[str, Any] = {"model": self.settings.model, "messages": messages, **extra}
        if self.settings.temperature is not None:
            body["temperature"] = self.settings.temperature
        begin = time.monotonic()
        try:
            completion = self._limited(body, max_tokens)
        except LlmError as error:
            raise type(error)(self.strike(str(error)), **_facts(error)) from None
        return self._reply(completion, time.monotonic() - begin)

    def _limited(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Send with the limit under the name that the endpoint knows."""
        try:
            return _within(self.settings.timeout_s, self._send, {**body, self._limit: max_tokens})
        except Rejected as error:
            if self._limit == LIMITS[1] or LIMITS[1] not in str(error):
                raise
            self._limit = LIMITS[1]
        return _within(self.settings.timeout_s, self._send, {**body, self._limit: max_tokens})

    def strike(self, text: str) -> str:
        """``text`` without the key."""
        key = self.settings.api_key.get_secret_value() if self.settings.api_key else ""
        return text.replace(key, "[key]") if key else text

    def _reply(self, completion: dict[str, Any], seconds: float) -> Reply:
        try:
            choice = completion["choices"][0]
            message = dict(choice["message"])
        except (KeyError, IndexError, TypeError):
            raise Transient("the endpoint's answer has no message", maybe_paid=True) from None
        usage = completion.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Reply(
            message=message,
            finish_reason=choice.get("finish_reason"),
            tokens_in=_count(usage.get("prompt_tokens")),
            tokens_cached=_count(cached),
            tokens_out=_count(usage.get("completion_tokens")),
            model=str(completion.get("model") or self.settings.model)[:128],
            seconds=seconds,
        )


def _within(seconds: float, send: Sender, body: dict[str, Any]) -> dict[str, Any]:
    """``send(body)``, given up after so long: the SDK's own time-outs start anew with every byte that trickles in."""
    ended: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(send(body))
        except BaseException as error:
            ended.put(error)

    threading.Thread(target=run, name="llm", daemon=True).start()
    try:
        result = ended.get(timeout=seconds)
    except queue.Empty:
        raise Transient(f"no answer within {seconds:g} s", maybe_paid=True) from None
    if isinstance(result, BaseException):
        raise result
    return result


def _facts(error: LlmError) -> dict[str, Any]:
    if isinstance(error, Transient):
        return {"retry_after_s": error.retry_after_s, "maybe_paid": error.maybe_paid}
    return {"status": error.status} if isinstance(error, Rejected) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _sdk(settings: LlmSettings) -> Sender:
    """The OpenAI SDK as a sender, imported when first used (a quarter of a second)."""
    client: Any = None

    def send(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal client
        import openai

        if client is None:
            key = settings.api_key.get_secret_value() if settings.api_key else "none"
            transport = openai.DefaultHttpxClient(follow_redirects=False)
            client = openai.OpenAI(
                base_url=settings.base_url,
                api_key=key,
                max_retries=0,
                timeout=openai.Timeout(settings.timeout_s, connect=CONNECT_S),
                http_client=transport,
            )
        try:
            completion: dict[str, Any] = client.chat.completions.with_raw_response.create(**body).http_response.json()
        except openai.APIStatusError as error:
            raise _of_status(error) from None
        except openai.APITimeoutError:
            raise Transient("the endpoint timed out", maybe_paid=True) from None
        except openai.APIConnectionError as error:
            raise Transient(f"no connection: {error.__cause__ or error}") from None
        except (openai.OpenAIError, ValueError) as error:
            raise Transient(f"the endpoint's answer is no JSON: {error}", maybe_paid=True) from None
        if not isinstance(completion, dict):
            raise Transient("the endpoint's answer is no JSON object", maybe_paid=True)
        return completion

    return send


def _of_status(error: Any) -> LlmError:
    status = int(error.status_code)
    text = f"HTTP {status}: {str(error.message)[:600]}"
    lowered = text.lower()
    if status in (408, 409, 425, 429) or status >= 500:
        # some servers answer 500 where they do not know a way of asking
        if status == 500 and any(word in lowered for word in _ABOUT_MODES):
            return ModeUnsupported(text, status=status)
        return Transient(text, retry_after_s=_seconds(error.response.headers.get("retry-after")))
    if any(word in lowered for word in _TOO_LONG):
        return ContextTooLong(text, status=status)
    if status in (400, 404, 415, 422) and any(word in lowered for word in _ABOUT_MODES):
        return ModeUnsupported(text, status=status)
    return Rejected(text, status=status)


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None
