"""The diagnosis graph: measure -> gather -> diagnose -> act, around the align and the throughput stage.

``measure`` runs the stage itself. Where a model deviates or is slow, the facts become a finding with the causes and the
remedies that they allow, a policy chooses among these, and the choice goes into the stage's result, where the
pipeline's edges look: guilty kernels are dropped, or written anew with the diagnosis at hand. The rules' choice for a
deviation is what bisection found. Completion is an explicit outcome.
"""

from __future__ import annotations

import importlib
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

from agents.checkpoints import open_checkpointer
from agents.resume import run_to_end
from onboarding.context import StageContext, StageResult
from onboarding.policy import Cause, Diagnosis, Finding, Remedy, Suspect
from onboarding.stages.align.result import AlignResult
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.throughput.result import ThroughputResult

SHOWN = 6
"""Layers, or rows of a breakdown, that a finding tells."""
SLOWER = 0.97
"""Speed with the bundle over that without, below which it is a bottleneck of the kernels."""
HOST_SHARE = 0.3
"""Of a step outside the blocks, from which it is named as the bottleneck."""


class State(TypedDict, total=False):
    """One thread's state."""

    attempt: int
    result: dict[str, Any]
    finding: dict[str, Any] | None
    """None where nothing is to be diagnosed."""
    diagnosis: dict[str, Any] | None
    outcome: dict[str, Any] | None


def run_step(context: StageContext) -> StageResult:
    """Run align or throughput, and diagnose what came out.

    Raises:
        Problem, StageSkipped: of the stage.
    """
    nodes = _Nodes(context)
    config: RunnableConfig = {"configurable": {"thread_id": f"{context.job_id}:diagnose {context.stage}"}}
    begin = State(attempt=context.attempt, result={}, finding=None, diagnosis=None, outcome=None)
    with open_checkpointer(context.settings) as saver:
        final = run_to_end(build(nodes).compile(checkpointer=saver), config, begin, context.attempt)
    return RESULTS[context.stage].model_validate(final["result"])


RESULTS: dict[str, type[AlignResult] | type[ThroughputResult]] = {
    "align": AlignResult,
    "throughput": ThroughputResult,
}


def build(nodes: _Nodes) -> StateGraph[State, None, State, State]:
    """The graph over some nodes."""
    graph: StateGraph[State, None, State, State] = StateGraph(State)
    for name in ("measure", "gather", "diagnose", "act"):
        graph.add_node(name, getattr(nodes, name))
    graph.add_edge(START, "measure")
    graph.add_edge("measure", "gather")
    graph.add_conditional_edges("gather", lambda s: "diagnose" if s["finding"] else "act", ["diagnose", "act"])
    graph.add_edge("diagnose", "act")
    graph.add_edge("act", END)
    return graph


class _Nodes:
    """The graph's nodes, bound to one step's context."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.policy = context.policy

    def measure(self, state: State) -> dict[str, Any]:
        """Run the stage."""
        # Imported here: stages pull in torch, and the graph itself must be cheap to import.
        module = importlib.import_module(f"onboarding.stages.{self.context.stage}.stage")
        result: StageResult = module.run(self.context)
        return {"result": result.model_dump(mode="json")}

    def gather(self, state: State) -> dict[str, Any]:
        """What there is to diagnose, as facts."""
        if self.context.stage == "align":
            finding = self._deviation(AlignResult.model_validate(state["result"]))
        else:
            finding = self._bottleneck(ThroughputResult.model_validate(state["result"]))
        return {"finding": finding.model_dump(mode="json") if finding else None}

    def diagnose(self, state: State) -> dict[str, Any]:
        """Have the policy choose a cause and a remedy out of those that the facts allow."""
        diagnosis = self.policy.diagnose(Finding.model_validate(state["finding"]))
        return {"diagnosis": diagnosis.model_dump(mode="json")}

    def act(self, state: State) -> dict[str, Any]:
        """Write the choice where the pipeline's edges look."""
        result, outcome = dict(state["result"]), {"attempt": state["attempt"], "decision": "nothing to diagnose"}
        if state["diagnosis"]:
            diagnosis = Diagnosis.model_validate(state["diagnosis"])
            result |= {"diagnosis": state["diagnosis"], "remedy": diagnosis.remedy}
            if self.context.stage == "align" and diagnosis.remedy in ("drop", "repair"):
                result["culprits"] = diagnosis.digests
                result["why"] = [diagnosis.words, *Finding.model_validate(state["finding"]).evidence]
            outcome["decision"] = diagnosis.remedy
        return {"result": result, "outcome": outcome}

    # ---- facts -------------------------------------------------------------------------------------------------------

    def _deviation(self, result: AlignResult) -> Finding | None:
        if result.outcome != "misaligned":
            return None
        rows = sorted(result.layers, key=lambda row: -row.share)[:SHOWN]
        evidence = [
            f"{row.kind} {row.name}: {row.share:.3g} of its tolerance, relative RMS {row.rms:.2g}" for row in rows
        ]
        if not result.inside_band:
            evidence.append(f"the loss curve leaves its band, p = {result.p_value:.2g}")
        evidence += result.notes[:3]
        suspects = [self._suspect(digest) for digest in result.culprits]
        failed = any("did not run" in note for note in result.notes)
        causes: list[Cause] = ["did not run"] if failed else ["kernels"] if suspects else ["not the kernels"]
        remedies: list[Remedy] = ["drop"] if suspects else ["report"]
        # written anew once: a second deviation of the same job is answered by torch
        if suspects and self.policy.writes and self.context.attempt == 1:
            remedies.append("repair")
        return Finding(
            stage="align",
            summary=result.summary,
            evidence=evidence,
            suspects=suspects,
            causes=causes,
            remedies=remedies,
        )

    def _suspect(self, digest: str) -> Suspect:
        generated = self.context.result("generate", GenerateResult, digest)
        verdict = self.context.result("judge", JudgeResult, digest)
        evidence = f"the judge accepted it ({verdict.level}), worst error {verdict.worst_share:.2f} of its tolerance"
        return Suspect(digest=digest, words=generated.words, evidence=evidence)

    def _bottleneck(self, result: ThroughputResult) -> Finding:
        rows = sorted(result.breakdown, key=lambda row: -row.share)[:SHOWN]
        evidence = [
            f"{row.kind}: {row.share:.0%} of the step, {row.forward_ms:.3g} ms forward, {row.backward_ms:.3g} backward"
            for row in rows
        ]
        causes: list[Cause] = []
        if result.speedup is not None and result.speedup < SLOWER:
            causes.append("slower kernels")
            evidence.insert(0, f"with the bundle {result.speedup:.2f} x the speed without it")
        outside = sum(row.share for row in result.breakdown if row.block is None)
        if outside > HOST_SHARE:
            causes.append("host")
        causes.append("own code" if rows else "none")
        remedies: list[Remedy] = ["report"]
        return Finding(
            stage="throughput",
            summary=result.summary,
            evidence=evidence,
            suspects=[],
            causes=causes,
            remedies=remedies,
        )
