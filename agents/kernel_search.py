"""Kernel search for one operator spec: propose -> cheap checks -> judge -> accept | repair | give up -> tune.

A LangGraph graph whose thread is (job, operator). Generate, judge and tune run in different queues, so each step
enters the graph at its own node and leaves with an explicit outcome; the thread keeps what earlier steps learnt.
The state is plain JSON. A step that was killed is resumed where it stood: a finished node's answer is in the
checkpoint and is not computed again. That a snapshot has nothing next proves nothing; only ``outcome`` does.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from agents.checkpoints import open_checkpointer
from onboarding.context import StageContext, StageResult
from onboarding.policy import Move, SearchState
from onboarding.problem import Problem
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.tune.result import TuneResult

RESULTS: dict[str, type[StageResult]] = {"generate": GenerateResult, "judge": JudgeResult, "tune": TuneResult}


class State(TypedDict, total=False):
    """One thread's state."""

    stage: str
    """The step that runs now: generate, judge or tune."""
    attempt: int
    spec: dict[str, Any]
    verdicts: list[dict[str, Any]]
    """Earlier verdicts, oldest first: attempt, outcome, reasons."""
    move: dict[str, Any]
    """The policy's latest move."""
    result: dict[str, Any] | None
    """Result of the step that runs now."""
    outcome: dict[str, Any] | None
    """How the step ended: ``{"stage", "attempt", "decision"}``; None while it runs."""


def run_step(context: StageContext) -> StageResult:
    """Run one step (generate, judge or tune) of an operator's search and return its stage result.

    Raises:
        Problem: the step failed for a reason that a user should see.
        StageSkipped: the stage has nothing that it can honestly do here.
    """
    config: RunnableConfig = {"configurable": {"thread_id": f"{context.job_id}:{context.key}"}}
    with open_checkpointer(context.settings) as saver:
        graph = build(context).compile(checkpointer=saver)
        stored = graph.get_state(config).values
        # durability "sync": a node's answer is on disk before the next node starts, so a kill cannot lose it.
        same_step = stored.get("stage") == context.stage and stored.get("attempt") == context.attempt
        if same_step and _ended(stored):
            final = stored
        elif same_step:
            final = graph.invoke(None, config, durability="sync")
        else:
            final = graph.invoke(_entry(context, stored), config, durability="sync")
        if same_step and not _ended(final):
            # Killed between two checkpoint writes: nothing is next although the step did not end. Enter again.
            final = graph.invoke(_entry(context, final), config, durability="sync")
    if not _ended(final) or final.get("result") is None:
        raise Problem("search-without-outcome", "kernel search ended without an outcome", f"operator {context.key}")
    return RESULTS[context.stage].model_validate(final["result"])


def build(context: StageContext) -> StateGraph[State, None, State, State]:
    """The graph for one step; nodes call the stages with this context."""
    nodes = _Nodes(context)
    graph: StateGraph[State, None, State, State] = StateGraph(State)
    graph.add_node("propose", nodes.propose)
    graph.add_node("generate", nodes.generate)
    graph.add_node("check", nodes.check)
    graph.add_node("judge", nodes.judge)
    graph.add_node("decide", nodes.decide)
    graph.add_node("tune", nodes.tune)
    graph.add_conditional_edges(START, _entry_node, ["propose", "judge", "tune"])
    graph.add_edge("propose", "generate")
    graph.add_edge("generate", "check")
    graph.add_edge("check", END)
    graph.add_edge("judge", "decide")
    graph.add_edge("decide", END)
    graph.add_edge("tune", END)
    return graph


def compile_graph(context: StageContext) -> CompiledStateGraph[State, None, State, State]:
    """The graph without a checkpointer, for drawing and tests."""
    return build(context).compile()


def _entry(context: StageContext, stored: dict[str, Any]) -> State:
    gaps = context.load_result("gaps", "") or {}
    specs = {row["digest"]: row["spec"] for row in gaps.get("rows", []) if row.get("spec")}
    if context.key not in specs:
        raise Problem("unknown-operator", f"no operator spec {context.key} in the gap analysis", "run gaps again")
    return State(
        stage=context.stage,
        attempt=context.attempt,
        spec=specs[context.key],
        verdicts=list(stored.get("verdicts", [])),
        move=dict(stored.get("move", {})),
        result=None,
        outcome=None,
    )


def _entry_node(state: State) -> Literal["propose", "judge", "tune"]:
    if state["stage"] == "generate":
        return "propose"
    return "judge" if state["stage"] == "judge" else "tune"


def _ended(state: dict[str, Any]) -> bool:
    outcome = state.get("outcome")
    return outcome is not None and outcome["stage"] == state.get("stage") and outcome["attempt"] == state.get("attempt")


class _Nodes:
    """The graph's nodes, bound to one step's context."""

    def __init__(self, context: StageContext) -> None:
        self.context = context

    def _run_stage(self, stage: str) -> dict[str, Any]:
        # Imported here: stages pull in torch, and the graph itself must be cheap to import.
        module = importlib.import_module(f"onboarding.stages.{stage}.stage")
        result: StageResult = module.run(self.context)
        return result.model_dump(mode="json")

    def _end(self, decision: str) -> dict[str, Any]:
        return {"stage": self.context.stage, "attempt": self.context.attempt, "decision": decision}

    def _move(self, state: State) -> Move:
        return self.context.policy.next_move(
            SearchState(spec=state["spec"], attempt=state["attempt"], verdicts=tuple(state["verdicts"]))
        )

    def propose(self, state: State) -> dict[str, Any]:
        """Ask the policy what to try."""
        move = self._move(state)
        if move.action == "give_up":
            raise Problem("search-gave-up", f"the {self.context.policy.name} policy gave up", move.reason)
        return {"move": {"action": move.action, "reason": move.reason, "template_options": move.template_options}}

    def generate(self, state: State) -> dict[str, Any]:
        """Write the candidate."""
        return {"result": self._run_stage("generate")}

    def check(self, state: State) -> dict[str, Any]:
        """Cheap checks before the judge is bothered: it parses, and imports nothing but torch, triton, math."""
        result = GenerateResult.model_validate(state["result"])
        source = self.context.artifacts.get(result.candidate.digest)
        check_candidate(source.decode())
        return {"outcome": self._end("judge")}

    def judge(self, state: State) -> dict[str, Any]:
        """Have the candidate judged."""
        return {"result": self._run_stage("judge")}

    def decide(self, state: State) -> dict[str, Any]:
        """Accept, or let the policy choose between repair and giving up."""
        verdict = JudgeResult.model_validate(state["result"])
        entry = {"attempt": state["attempt"], "outcome": verdict.outcome, "reasons": verdict.reasons}
        verdicts = [*state["verdicts"], entry]
        if verdict.outcome == "accepted":
            return {"verdicts": verdicts, "outcome": self._end("accepted")}
        move = self._move(State(**{**state, "verdicts": verdicts}))
        result = verdict.model_copy(update={"next_move": move.action}).model_dump(mode="json")
        return {"verdicts": verdicts, "result": result, "outcome": self._end(move.action)}

    def tune(self, state: State) -> dict[str, Any]:
        """Search launch configurations of the accepted candidate."""
        return {"result": self._run_stage("tune"), "outcome": self._end("tuned")}


def check_candidate(source: str) -> None:
    """Refuse source that has no place in a kernel module. A filter only: acceptance is the judge's alone.

    Raises:
        Problem: ``candidate-invalid``, with the line.
    """
    # Imported here: it looks at torch to tell its functions from its submodules.
    from onboarding.stages.judge.structure import findings

    found = findings(source.encode())
    if found:
        detail = "; ".join(f"line {finding.line}: {finding.what}" for finding in found[:5])
        raise Problem("candidate-invalid", found[0].what, detail)
