"""What the API and the Agent tab show: the ledger as a story, its sums, and what waits for a person."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from onboarding.artifacts import ArtifactStore
from onboarding.records import LedgerEntry, Step

LONGEST_DIFF = 400
"""Lines."""


class LedgerView(BaseModel):
    """One entry of the ledger, without what was asked and answered."""

    id: int
    stage: str
    key: str
    attempt: int
    role: str
    state: str
    model: str
    tokens_in: int
    tokens_cached: int
    tokens_out: int
    money: float = Field(description="USD")
    gpu_s: float
    wall_s: float
    note: str
    created_at: datetime
    finished_at: datetime | None


class LedgerDetail(LedgerView):
    """One entry with what was asked and answered."""

    request: dict[str, Any] | None
    answer: dict[str, Any] | None


class Sums(BaseModel):
    """What was spent, and is reserved."""

    calls: int = 0
    tokens: int = 0
    money: float = 0.0
    gpu_s: float = 0.0
    wall_s: float = 0.0


class Waiting(BaseModel):
    """A step that waits for a person."""

    stage: str
    key: str
    attempt: int
    since: datetime


class AgentView(BaseModel):
    """The agents of a job."""

    total: Sums
    by_role: dict[str, Sums]
    waiting: list[Waiting]
    entries: list[LedgerView]


class Decision(BaseModel):
    """A person's word on a step that waits."""

    stage: str = Field(max_length=32)
    key: str = Field(default="", max_length=64)
    approve: bool


class Candidate(BaseModel):
    """An edited candidate."""

    source: str = Field(min_length=1, max_length=256 * 1024)


class Chapter(BaseModel):
    """One entry as the story tells it."""

    entry: LedgerView
    title: str
    asked: list[tuple[str, str]] = Field(default_factory=list)
    """(role of the message, text)."""
    said: list[tuple[str, str]] = Field(default_factory=list)
    """(what, text): plan, diagnosis, source."""
    reasons: list[str] = Field(default_factory=list)
    passed: bool | None = None
    diff: str = ""
    """Against the try that it was made from."""


def sums(entries: Sequence[LedgerEntry]) -> Sums:
    """Their total."""
    return Sums(
        calls=sum(e.request is not None for e in entries),
        tokens=sum(e.tokens_in + e.tokens_out for e in entries),
        money=sum(e.money for e in entries),
        gpu_s=sum(e.gpu_s for e in entries),
        wall_s=sum(e.wall_s for e in entries),
    )


def waiting_steps(steps: Sequence[Step]) -> list[Waiting]:
    """Steps that wait for approval."""
    return [
        Waiting(stage=s.stage, key=s.key, attempt=s.attempt, since=s.created_at) for s in steps if s.state == "waiting"
    ]


def agent_view(entries: Sequence[LedgerEntry], steps: Sequence[Step]) -> AgentView:
    """The agents of a job."""
    roles = dict.fromkeys(e.role for e in entries)
    return AgentView(
        total=sums(entries),
        by_role={role: sums([e for e in entries if e.role == role]) for role in roles},
        waiting=waiting_steps(steps),
        entries=[ledger_view(e) for e in entries],
    )


def ledger_view(entry: LedgerEntry) -> LedgerView:
    """An entry for a list."""
    return LedgerView(**entry.model_dump(include=set(LedgerView.model_fields)))


def ledger_detail(entry: LedgerEntry) -> LedgerDetail:
    """An entry with its texts."""
    return LedgerDetail(**entry.model_dump(include=set(LedgerDetail.model_fields)))


def story(entries: Sequence[LedgerEntry], artifacts: ArtifactStore) -> dict[str, list[Chapter]]:
    """The chapters by operator digest (empty: of the whole job), in order."""
    told: dict[str, list[Chapter]] = {}
    candidates: dict[tuple[str, int], str] = {}
    for entry in entries:
        chapter = Chapter(entry=ledger_view(entry), title=_title(entry))
        facts = entry.answer or {}
        if entry.role in ("check", "judge", "tune"):
            chapter.reasons = [str(reason) for reason in facts.get("reasons") or ()][:8]
            chapter.passed = not chapter.reasons
            if entry.role == "check" and facts.get("candidate"):
                number, parent = int(facts.get("number", 0)), facts.get("parent")
                candidates[entry.key, number] = str(facts["candidate"])
                before = candidates.get((entry.key, int(parent))) if parent else None
                chapter.diff = diff(artifacts, before, str(facts["candidate"]))
        else:
            chapter.asked = [(m["role"], m["content"]) for m in (entry.request or {}).get("messages", ())]
            chapter.said = _said(facts.get("message") or {})
        told.setdefault(entry.key, []).append(chapter)
    return told


def _title(entry: LedgerEntry) -> str:
    facts = entry.answer or {}
    titles: dict[str, Callable[[], str]] = {
        "check": lambda: f"try {facts.get('number', '?')} by {facts.get('origin', '?')} is checked",
        "judge": lambda: f"the judge: {facts.get('summary') or facts.get('outcome', '')}",
        "tune": lambda: f"tuned: {facts.get('summary', '')}",
    }
    if entry.role in titles:
        return titles[entry.role]()
    words = {"answered": "answers", "failed": "gets no answer", "lost": "may have been paid without an answer"}
    return f"the {entry.role} {words.get(entry.state, 'is asked')}"


def _said(message: dict[str, Any]) -> list[tuple[str, str]]:
    """An answer's fields; the whole text where it is no JSON object."""
    content: Any = message.get("content")
    for call in message.get("tool_calls") or ():
        content = (call.get("function") or {}).get("arguments", content)
    try:
        data = json.loads(content) if isinstance(content, str) else content
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return [("answer", str(content or message.get("refusal") or ""))]
    return [(name, value if isinstance(value, str) else json.dumps(value, indent=1)) for name, value in data.items()]


def diff(artifacts: ArtifactStore, before: str | None, after: str) -> str:
    """A unified diff of two candidates; empty where there is nothing to compare with."""
    if before is None:
        return ""
    try:
        old, new = (artifacts.get(d).decode("utf-8", "replace").splitlines() for d in (before, after))
    except (FileNotFoundError, ValueError):
        return ""
    lines = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=2))
    cut = [f"... {len(lines) - LONGEST_DIFF} more lines"] if len(lines) > LONGEST_DIFF else []
    return "\n".join([*lines[:LONGEST_DIFF], *cut])
