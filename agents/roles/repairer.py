"""The repairer: from a candidate and what is wrong with it to a better one."""

from __future__ import annotations

from typing import Any

from agents.llm.answers import Answer
from agents.llm.caller import Question
from agents.llm.prompt import Data
from agents.roles.author import LESSONS_SHOWN
from agents.roles.common import LONGEST_SOURCE, guide, operator_data
from onboarding.policy import RUNGS, Try

ROLE = "repairer"
HISTORY_SHOWN = 4


class Edit(Answer):
    """One replacement."""

    old: str
    """Text of the candidate, exactly as it stands there and once only."""
    new: str


class Repair(Answer):
    """A repaired candidate."""

    diagnosis: str
    """The cause, in one or two sentences."""
    edits: list[Edit]
    """Replacements, made one after the other; empty if ``source`` is given."""
    source: str
    """The whole new module, where edits would be most of it; else empty."""


class EditError(ValueError):
    """An edit does not fit the source."""


def question(
    spec: dict[str, Any], *, broken: Try, source: str, history: list[Try], lessons: list[str], sample: int = 0
) -> Question:
    """What the repairer is asked.

    Args:
        broken: the try to repair.
        source: its source, without the contract that we add.
        history: other tries, oldest first.
        lessons: of earlier searches.
        sample: how often it was repaired before.
    """
    judged = "verdict of the judge" if broken.refused else f"what the check after '{RUNGS[broken.rung]}' says"
    data = operator_data(spec)
    data.append(Data(title="candidate", text=source, most=LONGEST_SOURCE))
    data.append(Data(title=judged, text="\n".join(broken.reasons) or "nothing", most=8_000))
    told = [f"try {t.number}, from {t.parent}: {t.words[:300]} -> {'; '.join(t.reasons)[:300]}" for t in history]
    if told:
        data.append(Data(title="other tries", text="\n".join(told[-HISTORY_SHOWN:]), most=4_000, rank=6))
    if lessons:
        text = "\n".join(f"- {lesson}" for lesson in lessons[:LESSONS_SHOWN])
        data.append(Data(title="lessons of earlier searches", text=text, most=4_000, rank=7))
    task = (
        "Repair the candidate. Find the cause first; a change that only hides the failing case will be refused on the "
        "next one. Answer with the diagnosis and either edits or the whole source."
    )
    return Question(role=ROLE, system=guide(), task=task, data=tuple(data), sample=sample)


def apply(repair: Repair, source: str) -> str:
    """The new source.

    Raises:
        EditError: an edit's old text is not there, or more than once.
    """
    if repair.source.strip():
        return repair.source
    if not repair.edits:
        raise EditError("neither edits nor a source")
    for number, edit in enumerate(repair.edits, start=1):
        found = source.count(edit.old) if edit.old else 0
        if found != 1:
            raise EditError(f"the old text of edit {number} stands {found} times in the candidate")
        source = source.replace(edit.old, edit.new)
    return source
