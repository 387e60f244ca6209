"""Policies decide what to try next; they never decide what is true (the judge does). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from onboarding.architecture import Record
from onboarding.novel.facts import NovelModule, OperatorProposal

Action = Literal["specialise", "write", "repair", "submit", "give_up"]
"""``specialise`` a template, ``write`` a candidate from scratch, ``repair`` one, ``submit`` one to the judge."""
Origin = Literal["template", "author", "repairer", "analyst", "hand"]

RUNGS = ("nothing", "composes", "clean", "decomposed", "compiles", "one shape")
"""The ladder of checks before the judge, cheap to dear; a try stands on the last that it passed."""
TOP = len(RUNGS) - 1


class Try(Record):
    """One candidate of a search, and how far it came."""

    number: int
    parent: int | None
    """The try that it was made from."""
    origin: Origin
    candidate: str = ""
    """Digest of its source; empty where no source came of it."""
    words: str = ""
    """What its author says of it; outside text."""
    rung: int = 0
    passed: float = 0.0
    """Share of cases passed, at the one-shape check or by the judge."""
    share: float = 1e300
    """Worst error as a share of its tolerance."""
    reasons: list[str] = Field(default_factory=list)
    """Why it stands no higher; the judge's, once it was refused."""
    entry: int = 0
    """Ledger entry of the call that wrote it."""
    refused: bool = False
    """By the judge."""

    @property
    def score(self) -> tuple[int, float, float]:
        """What a better try has more of."""
        return self.rung, self.passed, -self.share


class Move(Record):
    """A policy's decision."""

    action: Action
    reason: str
    target: int | None = None
    """Number of the try to repair or submit."""


class Draft(Record):
    """A written candidate, before any check."""

    source: str
    """Empty where none came: ``words`` says why."""
    decomposition: str = ""
    """The kernel's algorithm as a reference in plain torch."""
    words: str = ""
    entry: int = 0


class SearchState(Record):
    """What a policy may know of one operator's kernel search."""

    spec: dict[str, Any]
    attempt: int
    verdicts: list[dict[str, Any]] = Field(default_factory=list)
    """Earlier verdicts of this operator, oldest first: attempt, outcome, reasons."""
    tries: list[Try] = Field(default_factory=list)
    lessons: list[str] = Field(default_factory=list)
    """What earlier searches in this family learnt; outside text."""
    stopped: str = ""
    """Why nothing more may be spent; empty while something may."""


Cause = Literal["none", "kernels", "did not run", "not the kernels", "slower kernels", "own code", "host"]
"""Of a deviation or a bottleneck: ``kernels`` found guilty, a twin that ``did not run``, a deviation that is ``not the
kernels``'; kernels slower than what they replace, the model's ``own code`` that no kernel serves, or the ``host``."""
Remedy = Literal["drop", "repair", "report"]
"""``drop`` kernels, write them anew (``repair``), or only ``report``."""


class Suspect(Record):
    """A kernel that may be the cause."""

    digest: str
    words: str
    evidence: str
    """What was measured of it."""


class Finding(Record):
    """A deviation or a bottleneck as a diagnosis sees it: facts only."""

    stage: Literal["align", "throughput"]
    summary: str
    evidence: list[str]
    """Worst first."""
    suspects: list[Suspect]
    causes: list[Cause]
    """Those that the facts allow, the likeliest first."""
    remedies: list[Remedy]
    """Those that the pipeline can carry out for these facts, the rules' choice first."""


class Diagnosis(Record):
    """Cause and action."""

    cause: Cause
    remedy: Remedy
    digests: list[str] = Field(default_factory=list)
    """Kernels that the remedy is for."""
    words: str
    """For people."""
    by: str
    """Whose choice: ``rules`` or ``llm``."""


class Tuned(Record):
    """A timed kernel as an analyst sees it."""

    digest: str
    words: str
    source: str
    share_of_step: float
    """Of the step's time, what the operator takes before it has a kernel."""
    milliseconds: float
    floor_ms: float
    """By bytes and FLOPs on this device."""
    rows: list[dict[str, Any]]
    """Timed configurations, best first: bucket, config, milliseconds."""
    resources: list[dict[str, Any]] = Field(default_factory=list)
    """Registers, spills and shared memory by kernel."""


class Change(Record):
    """The next change to try."""

    words: str
    """What to change and why."""
    expected_ms: float
    """The operator's time after it."""


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What a check or a stage took, for the ledger."""

    role: str
    call: str
    gpu_s: float
    wall_s: float
    facts: dict[str, Any]


class RoleCost(Record):
    """What a job spent in one role."""

    role: str
    calls: int
    tokens: int
    money: float
    """USD."""
    gpu_s: float
    wall_s: float


class Policy(Protocol):
    """Chooses the next move of a kernel search, and writes what the move asks for."""

    name: str
    writes: bool
    """Whether it can write and repair candidates."""

    def next_move(self, state: SearchState) -> Move: ...

    def lessons(self, family: str) -> list[str]: ...

    def write(self, move: Move, state: SearchState, sources: dict[str, str]) -> Draft:
        """A candidate for ``move``; ``sources`` holds those of earlier tries by digest.

        Raises:
            Problem: nothing more may be spent, the job was cancelled, or nobody answers.
        """
        ...

    def learn(self, family: str, lesson: str) -> None: ...

    def charge(self, spending: Spending) -> None: ...

    def narrate(self, facts: dict[str, Any]) -> str:
        """A summary of a job in words, every number of which stands in ``facts``; empty for none."""
        ...

    def costs(self) -> list[RoleCost]:
        """What the job's agents spent so far, by role."""
        ...

    def propose(self, module: NovelModule, failures: list[str], number: int) -> OperatorProposal | None:
        """An operator that a novel module computes; None where nothing can be proposed.

        Args:
            failures: why earlier proposals for it were not proven.
            number: of earlier proposals.

        Raises:
            Problem: as :meth:`write`.
        """
        ...

    def diagnose(self, finding: Finding) -> Diagnosis:
        """Cause and action, out of those that the finding allows."""
        ...

    def analyse(self, tuned: list[Tuned], number: int) -> tuple[str, Change] | None:
        """The operator and change with the largest expected gain on the whole step; None where none is worth it."""
        ...


class RulePolicy:
    """The deterministic policy: specialise the family's template; a refused template candidate is not retried.

    The template is deterministic, so a second candidate would be byte for byte the first: after a refusal the
    operator stays with its torch provider and the report says so. The same for an operator that no family covers.
    """

    name = "rules"
    writes = False

    def next_move(self, state: SearchState) -> Move:
        """Propose once, then give up."""
        ready = [t for t in state.tries if t.rung == TOP and not t.refused]
        if ready:
            return Move(action="submit", reason="the checks before the judge are passed", target=ready[-1].number)
        if state.tries and state.tries[-1].origin == "hand":
            why = "; ".join(state.tries[-1].reasons)
            return Move(action="give_up", reason=f"the edited candidate is no good: {why}")
        if state.spec["family"] == "novel":
            return Move(action="give_up", reason="novel, served by its own torch code: no language model is configured")
        if not state.verdicts and not state.tries:
            return Move(action="specialise", reason=f"specialise the {state.spec['family']} template")
        return Move(action="give_up", reason="the template's candidate was refused; torch keeps serving the operator")

    def lessons(self, family: str) -> list[str]:
        """None are kept."""
        return []

    def write(self, move: Move, state: SearchState, sources: dict[str, str]) -> Draft:
        """Rules write nothing."""
        raise NotImplementedError("the rule policy never asks for a written candidate")

    def learn(self, family: str, lesson: str) -> None:
        """Nothing is kept."""

    def charge(self, spending: Spending) -> None:
        """Nothing is limited."""

    def narrate(self, facts: dict[str, Any]) -> str:
        """The report has its own fixed words."""
        return ""

    def costs(self) -> list[RoleCost]:
        """Rules cost nothing."""
        return []

    def propose(self, module: NovelModule, failures: list[str], number: int) -> OperatorProposal | None:
        """Rules know the families; what matches none has no rule."""
        return None

    def diagnose(self, finding: Finding) -> Diagnosis:
        """The likeliest cause and the first remedy that the facts allow."""
        return ruled(finding)

    def analyse(self, tuned: list[Tuned], number: int) -> tuple[str, Change] | None:
        """Rules search configurations and write nothing."""
        return None


def ruled(finding: Finding) -> Diagnosis:
    """The rules' diagnosis: the first cause and the first remedy."""
    cause, remedy = finding.causes[0], finding.remedies[0]
    digests = [suspect.digest for suspect in finding.suspects] if remedy in ("drop", "repair") else []
    words = f"{finding.evidence[0] if finding.evidence else finding.summary}"
    return Diagnosis(cause=cause, remedy=remedy, digests=digests, words=words[:600], by="rules")
