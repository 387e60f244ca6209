"""The policy with a language model: the search is ours and deterministic, only the writing is the model's.

Best first: the try that stands highest is refined, a few times each; a fresh candidate is written while there are
seeds left and refining brings nothing. What is submitted, how often, and when to stop never depends on what an answer
says, only on how far its candidate climbs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from agents.llm.caller import Caller
from agents.llm.errors import LlmError
from agents.roles import analyst, architect, author, diagnoser, repairer, reporter
from onboarding.novel.facts import NovelModule, OperatorProposal
from onboarding.policy import (
    RUNGS,
    TOP,
    Change,
    Diagnosis,
    Draft,
    Finding,
    Move,
    RoleCost,
    SearchState,
    Spending,
    Try,
    Tuned,
    ruled,
)
from onboarding.problem import Problem
from onboarding.store import Call, Purse
from onboarding.store.ledger import spent_problem

CHILDREN = 3
"""How often one try is repaired before another is."""
PATIENCE = 3
"""Repairs without a better score after which a fresh candidate is written, while there are seeds."""
LESSONS = 12


class LLMPolicy:
    """Searches with a language model.

    Args:
        caller: asks it, on the step's account.
    """

    name = "llm"
    writes = True

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.settings = caller.settings

    # ---- the search ----------------------------------------------------------------------------------------------

    def next_move(self, state: SearchState) -> Move:
        """What to try next."""
        tries = state.tries
        if state.spec["family"] != "novel" and not tries and not state.verdicts:
            return Move(action="specialise", reason=f"specialise the {state.spec['family']} template")
        ready = [t for t in tries if t.rung == TOP and not t.refused]
        if ready:
            best = max(ready, key=lambda t: t.score)
            return Move(action="submit", reason="it passes the checks before the judge", target=best.number)
        if state.stopped:
            return Move(action="give_up", reason=state.stopped)
        written = [t for t in tries if t.origin in ("author", "repairer")]
        if len(written) >= self.settings.rounds:
            return Move(action="give_up", reason=f"{len(written)} candidates were written, none was accepted")
        seeds = sum(t.origin == "author" for t in tries)
        children = {t.number: sum(c.parent == t.number for c in tries) for t in tries}
        open_tries = [t for t in tries if t.candidate and children[t.number] < CHILDREN]
        fresh = seeds < self.settings.seeds
        if open_tries and not (fresh and self._stalled(tries)):
            best = max(open_tries, key=lambda t: t.score)
            return Move(
                action="repair", reason=f"try {best.number} stands highest: {self._place(best)}", target=best.number
            )
        if fresh:
            return Move(action="write", reason=f"first candidate {seeds + 1} of {self.settings.seeds}")
        return Move(action="give_up", reason="no candidate is left that could be refined")

    @staticmethod
    def _place(one: Try) -> str:
        return "refused by the judge" if one.refused else RUNGS[one.rung]

    @staticmethod
    def _stalled(tries: list[Try]) -> bool:
        """The last tries brought no better score than there was before them."""
        if len(tries) <= PATIENCE:
            return False
        before, last = tries[:-PATIENCE], tries[-PATIENCE:]
        return max(t.score for t in last) <= max(t.score for t in before)

    # ---- the writing ---------------------------------------------------------------------------------------------

    def write(self, move: Move, state: SearchState, sources: dict[str, str]) -> Draft:
        """Ask the author or the repairer."""
        try:
            if move.action == "write":
                return self._author(state)
            broken = next(t for t in state.tries if t.number == move.target)
            return self._repairer(state, broken, sources[broken.candidate])
        except LlmError as error:
            return Draft(source="", words=f"{type(error).__name__}: {error}"[:600])

    def _author(self, state: SearchState) -> Draft:
        sample = sum(t.origin == "author" for t in state.tries)
        asked = author.question(state.spec, sample=sample, lessons=state.lessons)
        answer, entry = self.caller.ask(asked, author.Written)
        return Draft(source=answer.source, decomposition=answer.decomposition, words=answer.plan[:2000], entry=entry)

    def _repairer(self, state: SearchState, broken: Try, source: str) -> Draft:
        history = [t for t in state.tries if t.number != broken.number and t.reasons]
        asked = repairer.question(
            state.spec,
            broken=broken,
            source=source,
            history=history,
            lessons=state.lessons,
            sample=sum(t.parent == broken.number for t in state.tries),
        )
        answer, entry = self.caller.ask(asked, repairer.Repair)
        try:
            changed = repairer.apply(answer, source)
        except repairer.EditError as error:
            return Draft(source="", words=f"{error}; {answer.diagnosis}"[:2000], entry=entry)
        return Draft(source=changed, words=answer.diagnosis[:2000], entry=entry)

    # ---- the other roles ---------------------------------------------------------------------------------------------

    def propose(self, module: NovelModule, failures: list[str], number: int) -> OperatorProposal | None:
        """Ask the architect."""
        try:
            answer, _ = self.caller.ask(architect.question(module, failures, number), architect.Proposed)
        except LlmError:
            return None
        return architect.proposal_of(answer)

    def diagnose(self, finding: Finding) -> Diagnosis:
        """Ask the diagnoser, out of what the facts allow; the rules where it does not answer."""
        try:
            answer, _ = self.caller.ask(diagnoser.question(finding), diagnoser.Diagnosed)
            return diagnoser.within(answer, finding)
        except (LlmError, Problem) as error:
            if isinstance(error, Problem) and error.kind == "job-cancelled":
                raise
            return ruled(finding)

    def analyse(self, tuned: list[Tuned], number: int) -> tuple[str, Change] | None:
        """Ask the analyst for each kernel that has room, and take what gains most on the whole step."""
        return analyst.best(self.caller, tuned, number)

    # ---- memory and money ----------------------------------------------------------------------------------------

    def lessons(self, family: str) -> list[str]:
        """What earlier searches of this project learnt in the family."""
        return self.caller.store.lessons(self.caller.who.project, family, LESSONS)

    def learn(self, family: str, lesson: str) -> None:
        """Keep a lesson for later searches."""
        self.caller.store.add_lesson(self.caller.who.project, family, lesson)

    def charge(self, spending: Spending) -> None:
        """Write what a check or a stage took into the ledger.

        Raises:
            Problem: ``budget-spent``: the job's seconds are used up.
        """
        call = Call(**vars(self.caller.who), role=spending.role, call=spending.call)
        self.caller.store.charge(call, gpu_s=spending.gpu_s, wall_s=spending.wall_s, facts=spending.facts)
        limits, store = self.caller.limits, self.caller.store
        for scope, limit, key in (("job", limits.job, ""), ("operator", limits.operator, call.key)):
            spent = store.spent(job_id=call.job_id, key=key)
            if limit is not None and (spent.gpu_s > limit.gpu_s or spent.wall_s > limit.wall_s):
                over = f"GPU {spent.gpu_s:.0f} of {limit.gpu_s:.0f} s, wall {spent.wall_s:.0f} of {limit.wall_s:.0f} s"
                raise spent_problem(scope, over)

    def narrate(self, facts: dict[str, Any]) -> str:
        """The reporter's summary, if every number in it stands in the record; else none."""
        try:
            return reporter.summary(self.caller, facts)
        except (LlmError, Problem):
            return ""

    def costs(self) -> list[RoleCost]:
        """The ledger, summed by role."""
        entries = self.caller.store.ledger(self.caller.who.job_id)
        return [
            RoleCost(
                role=role,
                calls=sum(e.request is not None for e in entries if e.role == role),
                tokens=sum(e.tokens_in + e.tokens_out for e in entries if e.role == role),
                money=sum(e.money for e in entries if e.role == role),
                gpu_s=sum(e.gpu_s for e in entries if e.role == role),
                wall_s=sum(e.wall_s for e in entries if e.role == role),
            )
            for role in dict.fromkeys(e.role for e in entries)
        ]


def for_operator(caller: Caller, share: float, step_wall_s: float) -> Caller:
    """The caller with an operator's share of the job's budget as a hard limit, at least a tenth of it.

    The search ends well before its step's own time limit would kill it.
    """
    job = caller.limits.job
    if job is None:
        return caller
    part = min(1.0, max(0.1, share))
    mine = Purse(
        tokens=int(job.tokens * part),
        money=job.money * part,
        gpu_s=job.gpu_s * part,
        wall_s=min(job.wall_s * part, 0.8 * step_wall_s),
    )
    return dataclasses.replace(caller, limits=dataclasses.replace(caller.limits, operator=mine))
