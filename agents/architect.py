"""The architect's graph: survey -> choose -> propose -> prove -> choose ... -> finish. It follows the gap analysis.

Each module of the model that matches nothing known is looked at (its code, what its cores are called with), an operator
is proposed for it, and the proposal is proven against the module's own code in the sandbox. What is proven becomes an
operator spec among the gaps, with its place in the model; what is not stays "novel, served by its own torch code". The
rules propose nothing. The state is plain JSON, written after every node; completion is an explicit outcome.
"""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

from agents.checkpoints import open_checkpointer
from agents.resume import run_to_end
from onboarding.context import StageContext
from onboarding.custom_code.definition import definition_of
from onboarding.devices import find_device
from onboarding.novel.confined import prove, survey
from onboarding.novel.facts import Named, NovelModule, OperatorProposal, own_code, use_of
from onboarding.novel.rows import with_novel
from onboarding.problem import Problem
from onboarding.stages.gaps.result import GapsResult
from onboarding.stages.gaps.stage import run as analyse
from onboarding.stages.parse.result import ParseResult
from onboarding.twin.confined import derive_twin
from onboarding.twin.plan import TwinPlan

TRIES = 3
"""Proposals for one module."""
SPENT = ("budget-spent", "llm-unreachable", "llm-rejected", "llm-key", "llm-context", "llm-unusable")
MODULES_AT_MOST = 8


class State(TypedDict, total=False):
    """One thread's state."""

    attempt: int
    names: list[str]
    """Classes that are not settled yet."""
    plan: str
    """Of the twin, as JSON."""
    modules: list[dict[str, Any]]
    tries: int
    """Proposals for the first of ``names``."""
    failures: list[str]
    proposal: dict[str, Any] | None
    stopped: str
    """Why nothing more may be asked."""
    named: list[dict[str, Any]]
    uses: list[dict[str, Any]]
    outcome: dict[str, Any] | None


def run_step(context: StageContext) -> GapsResult:
    """Rank the gaps, and add the operators that are proven in modules which match nothing known.

    Raises:
        Problem: of the gap analysis; a module that cannot be looked at is no problem of the job.
    """
    gaps = analyse(context)
    architecture = context.result("parse", ParseResult).architecture
    names = list(dict.fromkeys([*architecture.novel, *(r.module for r in architecture.novel_references)]))
    if not names:
        return gaps
    nodes = _Nodes(context)
    config: RunnableConfig = {"configurable": {"thread_id": f"{context.job_id}:architect"}}
    begin = State(
        attempt=context.attempt, names=names[:MODULES_AT_MOST], plan="", modules=[], tries=0, failures=[],
        proposal=None, stopped="", named=[], uses=[], outcome=None,
    )  # fmt: skip
    with open_checkpointer(context.settings) as saver:
        final = run_to_end(build(nodes).compile(checkpointer=saver), config, begin, context.attempt)
    named = [Named.model_validate(one) for one in final["named"]]
    more = [own_code(name, "too many novel modules") for name in names[MODULES_AT_MOST:]]
    uses = [nodes.use(entry) for entry in final["uses"]]
    return with_novel(gaps, uses, [*named, *more], find_device(context.options.target))


def build(nodes: _Nodes) -> StateGraph[State, None, State, State]:
    """The graph over some nodes."""
    graph: StateGraph[State, None, State, State] = StateGraph(State)
    for name in ("survey", "propose", "prove", "finish"):
        graph.add_node(name, getattr(nodes, name))
    graph.add_edge(START, "survey")
    for node in ("survey", "prove"):
        graph.add_conditional_edges(node, _next, ["propose", "finish"])
    graph.add_conditional_edges(
        "propose", lambda s: "prove" if s["proposal"] else _next(s), ["prove", "propose", "finish"]
    )
    graph.add_edge("finish", END)
    return graph


def _next(state: State) -> str:
    return "propose" if state["names"] else "finish"


class _Nodes:
    """The graph's nodes, bound to one step's context."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.policy = context.policy
        self.where = {"scratch": context.scratch, "unsafe": context.settings.unsafe_no_sandbox}
        self.tokens = context.options.sequence_length

    def survey(self, state: State) -> dict[str, Any]:
        """Look at the modules; nothing is looked at for a policy that would propose nothing."""
        if not self.policy.writes:
            why = "no family covers it, and no language model is configured"
            return _settled(state, [own_code(name, why) for name in state["names"]])
        self.context.progress(0, 1, f"looking at {', '.join(state['names'])}")
        try:
            plan = derive_twin(
                definition_of(self.context),
                layers_at_least=self.context.profile.twin_layers,
                sequence_length=self.context.profile.sequence_length,
                **self.where,
            )
            modules = survey(definition_of(self.context), plan, state["names"], **self.where)
        except Problem as problem:
            why = f"it could not be looked at: {problem.title}"
            return _settled(state, [own_code(name, why) for name in state["names"]])
        seen = {module.name: module for module in modules}
        able = [name for name in state["names"] if name in seen and any(not c.obstacle for c in seen[name].cores)]
        others = [own_code(name, _why_not(seen.get(name))) for name in state["names"] if name not in able]
        found = _settled({**state, "names": [*able, *(o.module for o in others)]}, others)
        return {**found, "plan": plan.to_json(), "modules": [m.model_dump(mode="json") for m in modules]}

    def propose(self, state: State) -> dict[str, Any]:
        """Ask the policy for an operator of the first module that is open."""
        module = self._module(state)
        self.context.progress(state["tries"], TRIES, f"an operator for {module.name}")
        try:
            proposal = self.policy.propose(module, state["failures"], state["tries"])
        except Problem as problem:
            if problem.kind not in SPENT:
                raise
            return self._give_up(state, f"{problem.title}: {problem.detail}"[:300])
        if proposal is None:
            return self._give_up(state, "nothing was proposed for it")
        return {"proposal": proposal.model_dump(mode="json"), "tries": state["tries"] + 1}

    def prove(self, state: State) -> dict[str, Any]:
        """Try the proposal on the twin, in the sandbox."""
        module, proposal = self._module(state), OperatorProposal.model_validate(state["proposal"])
        self.context.progress(state["tries"], TRIES, f"proving {proposal.name[:60]}")
        try:
            use_of(module, proposal, self.tokens)
            plan = TwinPlan.from_json(state["plan"])
            proof = prove(definition_of(self.context), plan, module, proposal, self.tokens, **self.where)
            reasons = proof.reasons
        except (ValueError, Problem) as error:
            proof, reasons = None, [f"{error}: {error.detail}" if isinstance(error, Problem) else str(error)]
        if proof is not None and proof.proven:
            use = use_of(module, proposal, self.tokens)
            named = Named(
                module=module.name, outcome="operator", words=f"{proposal.name[:60]}, proven on the reduced twin",
                digest=use.digest, error=proof.error, checks=proof.checks, tries=state["tries"],
            )  # fmt: skip
            entry = {"module": module.name, "proposal": state["proposal"]}
            return {**_settled(state, [named]), "proposal": None, "uses": [*state["uses"], {**entry, **_place(module)}]}
        failures = [*state["failures"], *(f"claim {state['tries']}: {reason}" for reason in reasons[:6])]
        if state["tries"] >= TRIES:
            return self._give_up(state, f"no proposal was proven: {'; '.join(reasons[:2])}"[:400])
        return {"proposal": None, "failures": failures}

    def finish(self, state: State) -> dict[str, Any]:
        """End."""
        return {"outcome": {"attempt": state["attempt"], "decision": f"{len(state['uses'])} operators"}}

    def use(self, entry: dict[str, Any]) -> Any:
        """The operator of a proven entry."""
        module = NovelModule.model_validate(entry["seen"])
        return use_of(module, OperatorProposal.model_validate(entry["proposal"]), self.tokens)

    def _module(self, state: State) -> NovelModule:
        return NovelModule.model_validate(next(m for m in state["modules"] if m["name"] == state["names"][0]))

    def _give_up(self, state: State, why: str) -> dict[str, Any]:
        one = own_code(state["names"][0], why, state["tries"])
        return {**_settled(state, [one]), "proposal": None}


def _settled(state: State, done: list[Named]) -> dict[str, Any]:
    names = {one.module for one in done}
    return {
        "names": [name for name in state["names"] if name not in names],
        "named": [*state["named"], *(one.model_dump(mode="json") for one in done)],
        "tries": 0,
        "failures": [],
    }


def _place(module: NovelModule) -> dict[str, Any]:
    return {"seen": module.model_dump(mode="json")}


def _why_not(module: NovelModule | None) -> str:
    if module is None:
        return "the reduced twin never calls it"
    return f"no part of it can be taken over: {'; '.join(dict.fromkeys(c.obstacle for c in module.cores))}"
