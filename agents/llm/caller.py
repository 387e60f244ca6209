"""The one way to ask the language model: budget, rate, stored answers, retries, forms of answer.

Every answer is stored in the ledger before it is used, under a digest of its question: a step that is killed and runs
again asks the ledger first and pays for nothing twice. This is the only place that retries.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.llm import answers
from agents.llm.answers import MODES, A, Answer
from agents.llm.endpoint import Endpoint, Reply
from agents.llm.errors import ContextTooLong, Invalid, LlmError, ModeUnsupported, Rejected, Transient
from agents.llm.prompt import Data, messages, shown, tokens_of
from onboarding.problem import Problem
from onboarding.records import LedgerEntry
from onboarding.settings import AnswerMode, LlmSettings
from onboarding.store import BudgetLimits, Call, Purse, Store

CORRECTIONS = 2
"""How often an answer of the wrong form is sent back."""
LONGEST_BACKOFF_S = 60.0
SHRINK = 0.7
"""Of the context, when the endpoint says that a prompt is too long."""


@dataclass(frozen=True, kw_only=True)
class Who:
    """On whose account."""

    job_id: str
    project: str
    stage: str
    key: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a role asks."""

    role: str
    system: str
    """Fixed words of the role: the same in every call."""
    task: str
    """Our words for this call."""
    data: tuple[Data, ...]
    sample: int = 0
    """Tells apart several answers to one question."""

    def digest(self, who: Who, schema: type[Answer]) -> str:
        """What makes two questions the same: who asks, what, about which data; not how the answer is asked for."""
        parts = [who.stage, who.key, self.role, schema.__name__, self.system, self.task, self.sample]
        parts += [[d.title, d.text] for d in self.data]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


@dataclass(kw_only=True)
class Caller:
    """Asks an endpoint on one step's account."""

    endpoint: Endpoint
    store: Store
    who: Who
    settings: LlmSettings
    limits: BudgetLimits
    memory: Path | None = None
    """File that remembers which form of answer an endpoint serves."""
    sleep: Callable[[float], None] = time.sleep
    random: random.Random = field(default_factory=random.Random)

    def ask(self, question: Question, schema: type[A]) -> tuple[A, int]:
        """A valid answer and its ledger entry.

        Raises:
            Problem: the budget is spent, the job cancelled, the endpoint unreachable or refusing.
            Refused: the model declines.
            Invalid: no valid answer after :data:`CORRECTIONS` corrections.
        """
        name = f"{question.role}:{question.digest(self.who, schema)}"
        complaint: tuple[dict[str, Any], str] | None = None
        for correction in range(CORRECTIONS + 1):
            entry = self._paid(question, schema, f"{name}:{correction}", complaint)
            message = (entry.answer or {}).get("message", {})
            try:
                return answers.read(message, (entry.answer or {}).get("finish_reason"), schema), entry.id or 0
            except Invalid as wrong:
                if correction == CORRECTIONS:
                    raise
                complaint = (message, str(wrong))
        raise AssertionError("unreachable")

    # ---- one paid call -------------------------------------------------------------------------------------------

    def _paid(
        self, question: Question, schema: type[Answer], call: str, complaint: tuple[dict[str, Any], str] | None
    ) -> LedgerEntry:
        room = self.settings.context_tokens - self.settings.answer_tokens
        failures = 0
        while True:
            mode = self._mode()
            asked = self._messages(question, schema, mode, complaint, room)
            entry = self._reserve(question.role, call, asked, mode)
            assert entry.id is not None
            if entry.state == "answered":
                return entry
            begin = time.monotonic()
            try:
                reply = self.endpoint.ask(asked, answers.asking(schema, mode), self.settings.answer_tokens)
            except LlmError as error:
                paid = isinstance(error, Transient) and error.maybe_paid
                self.store.fail(entry.id, str(error), wall_s=time.monotonic() - begin, paid=paid)
                if isinstance(error, ModeUnsupported) and self._next_mode(mode):
                    continue
                if isinstance(error, ContextTooLong) and room > 2048:
                    room = int(room * SHRINK)
                    continue
                failures += 1
                if not isinstance(error, Transient) or failures > self.settings.retries:
                    raise _problem(error, failures) from error
                self.sleep(self._backoff(failures, error.retry_after_s))
                continue
            self._settle(entry.id, asked, reply, mode)
            stored = self.store.ledger_entry(self.who.job_id, entry.id)
            assert stored is not None
            return stored

    def _messages(
        self,
        question: Question,
        schema: type[Answer],
        mode: AnswerMode,
        complaint: tuple[dict[str, Any], str] | None,
        room: int,
    ) -> list[dict[str, Any]]:
        data = list(question.data)
        task = f"{question.task}\n\n{answers.instructions(schema, mode)}"
        if complaint is not None:
            earlier, wrong = complaint
            data.append(Data(title="your earlier answer", text=json.dumps(earlier)[:20_000], most=20_000, rank=9))
            task += f"\n\nYour earlier answer was not usable: {shown(wrong, 600)}. Answer again, in the form asked for."
        try:
            built = messages(question.system, task, data, room)
        except ValueError as error:
            detail = f"{error}; see ONBOARD_LLM_CONTEXT_TOKENS"
            raise Problem("llm-context", "the model's context is too small", detail) from error
        for message in built:
            message["content"] = self.endpoint.strike(message["content"])
        return built

    def _reserve(self, role: str, call: str, asked: list[dict[str, Any]], mode: AnswerMode) -> LedgerEntry:
        reads = sum(tokens_of(m["content"]) for m in asked)
        most = Purse(
            tokens=reads + self.settings.answer_tokens, money=self._money(reads, 0, self.settings.answer_tokens)
        )
        wanted = Call(
            **vars(self.who),
            role=role,
            call=call,
            model=self.settings.model,
            most=most,
            request={"messages": asked, "mode": mode},
        )
        while True:
            turn = self.store.reserve(wanted, self.limits)
            if turn.entry is not None:
                return turn.entry
            self.sleep(turn.wait_s)

    def _settle(self, entry_id: int, asked: list[dict[str, Any]], reply: Reply, mode: AnswerMode) -> None:
        tokens_in = reply.tokens_in or sum(tokens_of(m["content"]) for m in asked)
        tokens_out = reply.tokens_out or tokens_of(json.dumps(reply.message))
        cached = min(reply.tokens_cached, tokens_in)
        answer = {"message": reply.message, "finish_reason": reply.finish_reason, "mode": mode, "model": reply.model}
        self.store.settle(
            entry_id,
            json.loads(self.endpoint.strike(json.dumps(answer))),
            tokens_in=tokens_in,
            tokens_cached=cached,
            tokens_out=tokens_out,
            money=self._money(tokens_in - cached, cached, tokens_out),
            wall_s=reply.seconds,
            note="" if reply.tokens_out else "the endpoint reports no usage: tokens are estimates",
        )

    def _money(self, fresh: int, cached: int, out: int) -> float:
        price_cached = self.settings.price_in if self.settings.price_cached is None else self.settings.price_cached
        return (fresh * self.settings.price_in + cached * price_cached + out * self.settings.price_out) / 1e6

    def _backoff(self, failures: int, retry_after_s: float | None) -> float:
        """Seconds to wait: what the server asks, or twice as long each time; never all callers at once."""
        base = min(LONGEST_BACKOFF_S, 0.5 * 2.0**failures)
        if retry_after_s is not None:
            return min(retry_after_s, 10 * LONGEST_BACKOFF_S) + self.random.uniform(0.0, base)
        return base * self.random.uniform(0.5, 1.5)

    # ---- which form of answer ------------------------------------------------------------------------------------

    def _mode(self) -> AnswerMode:
        if self.settings.answers != "auto":
            return self.settings.answers
        known = remembered(self.memory).get(self._name())
        return known if known in MODES else MODES[0]

    def _name(self) -> str:
        return f"{self.settings.base_url} {self.settings.model}"

    def _next_mode(self, mode: AnswerMode) -> bool:
        """Remember that the endpoint does not serve ``mode``; whether there is another."""
        if self.settings.answers != "auto" or mode == MODES[-1]:
            return False
        remember(self.memory, self._name(), MODES[MODES.index(mode) + 1])
        return True


_in_process: dict[str, Any] = {}


def remembered(memory: Path | None) -> dict[str, Any]:
    """The forms of answer that endpoints serve, as far as known."""
    if memory is None:
        return _in_process
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(memory: Path | None, name: str, mode: AnswerMode) -> None:
    """Note the form of answer that an endpoint serves."""
    if memory is None:
        _in_process[name] = mode
        return
    memory.parent.mkdir(parents=True, exist_ok=True)
    aside = memory.with_suffix(f".{random.getrandbits(40):x}")
    aside.write_text(json.dumps(remembered(memory) | {name: mode}))
    aside.replace(memory)


def _problem(error: LlmError, failures: int) -> Problem:
    if isinstance(error, Rejected):
        kind = "llm-key" if error.status in (401, 403) else "llm-rejected"
        return Problem(kind, "the language model's endpoint refuses the request", shown(str(error), 600), status=502)
    tried = f"{failures} tries; the last: {shown(str(error), 600)}. `onboard doctor --llm` tries the endpoint."
    return Problem("llm-unreachable", "the language model does not answer", tried, status=502)
