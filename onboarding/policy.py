"""Policies decide what to try next; they never decide what is true (the judge does). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Action = Literal["propose", "repair", "give_up"]


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """What a policy may know of one operator's kernel search."""

    spec: dict[str, Any]
    attempt: int
    verdicts: tuple[dict[str, Any], ...] = ()
    """Earlier verdicts of this operator, oldest first: outcome, reasons."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A policy's decision."""

    action: Action
    reason: str
    template_options: dict[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses the next move of a kernel search."""

    name: str

    def next_move(self, state: SearchState) -> Move: ...


class RulePolicy:
    """The deterministic policy: specialise the family's template; a refused template candidate is not retried.

    The template is deterministic, so a second candidate would be byte for byte the first: after a refusal the
    operator stays with its torch provider and the report says so.
    """

    name = "rules"

    def next_move(self, state: SearchState) -> Move:
        """Propose once, then give up."""
        if not state.verdicts:
            return Move(action="propose", reason=f"specialise the {state.spec['family']} template")
        return Move(action="give_up", reason="the template's candidate was refused; torch keeps serving the operator")
