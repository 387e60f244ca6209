"""Kernel search for one operator: choose -> specialise | write -> check -> ... -> submit | give up; judge -> decide.

A LangGraph graph whose thread is (job, operator). Generate, judge and tune run in different queues, so each step
enters the graph at its own node and leaves with an explicit outcome; the thread keeps what earlier steps learnt.
The state is plain JSON. A step that was killed is resumed where it stood: a finished node's answer is in the
checkpoint and is not computed again. That a snapshot has nothing next proves nothing; only ``outcome`` does.

Both policies run this graph. Rules specialise the family's template once; a language model writes and repairs, and
what it writes climbs the checks of :mod:`agents.ladder` before the judge is bothered.
"""

from __future__ import annotations

import importlib
import time
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from agents.checkpoints import open_checkpointer
from onboarding.context import StageContext, StageResult
from onboarding.policy import RUNGS, TOP, Draft, Move, Origin, SearchState, Spending, Try, Tuned
from onboarding.problem import Problem, StageSkipped
from onboarding.stages.generate.compose import kernels_in
from onboarding.stages.generate.result import GenerateResult
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.tune.result import TuneResult

RESULTS: dict[str, type[StageResult]] = {"generate": GenerateResult, "judge": JudgeResult, "tune": TuneResult}
SPENT = ("budget-spent", "llm-unreachable", "llm-rejected", "llm-key", "llm-context")
"""Problems that end the writing, not the job: what was found so far counts."""
STEPS_AT_MOST = 2_000
"""Nodes of one step; the policy's rounds and budget end a search long before."""
LESSON_PART = 300


class State(TypedDict, total=False):
    """One thread's state."""

    stage: str
    """The step that runs now: generate, judge or tune."""
    attempt: int
    spec: dict[str, Any]
    hand: str
    """Digest of a source that a person submits in this step; empty for none."""
    verdicts: list[dict[str, Any]]
    """Earlier verdicts, oldest first: attempt, outcome, reasons."""
    tries: list[dict[str, Any]]
    lessons: list[str]
    stopped: str
    """Why nothing more may be spent."""
    move: dict[str, Any]
    """The policy's latest move."""
    draft: dict[str, Any]
    """What was written and is not checked yet, with its origin and parent."""
    generated: dict[str, Any]
    """Result of specialising the template."""
    result: dict[str, Any] | None
    """Result of the step that runs now."""
    outcome: dict[str, Any] | None
    """How the step ended: ``{"stage", "attempt", "decision", "reason"}``; None while it runs."""


def run_step(context: StageContext) -> StageResult:
    """Run one step (generate, judge or tune) of an operator's search and return its stage result.

    Raises:
        Problem: the step failed for a reason that a user should see.
        StageSkipped: the stage has nothing that it can honestly do here, or the search gave up.
    """
    thread = {"thread_id": f"{context.job_id}:{context.key}"}
    config: RunnableConfig = {"configurable": thread, "recursion_limit": STEPS_AT_MOST}
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
    if not _ended(final):
        raise Problem("search-without-outcome", "kernel search ended without an outcome", f"operator {context.key}")
    if final["outcome"]["decision"] == "gave_up":
        raise StageSkipped(final["outcome"]["reason"])
    return RESULTS[context.stage].model_validate(final["result"])


def build(context: StageContext) -> StateGraph[State, None, State, State]:
    """The graph for one step; nodes call the stages with this context."""
    nodes = _Nodes(context)
    graph: StateGraph[State, None, State, State] = StateGraph(State)
    for name in ("choose", "by_hand", "specialise", "write", "check", "submit", "give_up", "judge", "decide", "tune"):
        graph.add_node(name, getattr(nodes, name))
    graph.add_conditional_edges(START, _entry_node, ["choose", "by_hand", "judge", "tune"])
    graph.add_conditional_edges("choose", _after_choice, ["specialise", "write", "submit", "give_up"])
    for written in ("by_hand", "specialise", "write"):
        graph.add_edge(written, "check")
    graph.add_edge("check", "choose")
    graph.add_edge("judge", "decide")
    for last in ("submit", "give_up", "decide", "tune"):
        graph.add_edge(last, END)
    return graph


def compile_graph(context: StageContext) -> CompiledStateGraph[State, None, State, State]:
    """The graph without a checkpointer, for drawing and tests."""
    return build(context).compile()


def _entry(context: StageContext, stored: dict[str, Any]) -> State:
    gaps = context.load_result("gaps", "") or {}
    specs = {row["digest"]: row["spec"] for row in gaps.get("rows", []) if row.get("spec")}
    if context.key not in specs:
        raise Problem("unknown-operator", f"no operator spec {context.key} in the gap analysis", "run gaps again")
    kept = {name: stored[name] for name in ("verdicts", "tries", "lessons", "generated") if name in stored}
    fresh = State(verdicts=[], tries=[], lessons=[], generated={}, move={}, draft={})
    if context.input.get("misaligned"):
        kept["tries"] = _misaligned(kept.get("tries", []), [str(line) for line in context.input["misaligned"]])
    return State(
        **{**fresh, **kept},  # type: ignore[typeddict-item]  # the keys above
        stage=context.stage,
        attempt=context.attempt,
        spec=specs[context.key],
        hand=str(context.input.get("candidate", "")),
        stopped="",
        result=None,
        outcome=None,
    )


def _misaligned(tries: list[dict[str, Any]], why: list[str]) -> list[dict[str, Any]]:
    """The tries, the accepted one refused: the judge found nothing, the model deviates with it."""
    last = max((t["number"] for t in tries if t["rung"] == TOP and not t["refused"]), default=0)
    told = {"refused": True, "reasons": [f"accepted by the judge, but in the model: {line}"[:600] for line in why[:8]]}
    return [t | told if t["number"] == last else t for t in tries]


def _entry_node(state: State) -> str:
    if state["stage"] == "generate":
        return "by_hand" if state.get("hand") else "choose"
    return state["stage"]


def _after_choice(state: State) -> str:
    action: str = state["move"]["action"]
    return "write" if action == "repair" else action


def _ended(state: dict[str, Any]) -> bool:
    outcome = state.get("outcome")
    return outcome is not None and outcome["stage"] == state.get("stage") and outcome["attempt"] == state.get("attempt")


class _Nodes:
    """The graph's nodes, bound to one step's context."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.policy = context.policy

    # ---- generate ------------------------------------------------------------------------------------------------

    def choose(self, state: State) -> dict[str, Any]:
        """Ask the policy what to try. Lessons are read here, so that a resumed step asks the very same question."""
        lessons = self.policy.lessons(state["spec"]["family"])
        move = self.policy.next_move(self._search(State(**{**state, "lessons": lessons})))
        done = len(state["tries"])
        self.context.progress(done, done + 1, f"{move.action.replace('_', ' ')}: {move.reason}"[:160])
        return {"move": move.model_dump(), "lessons": lessons}

    def by_hand(self, state: State) -> dict[str, Any]:
        """Take a source that a person edited."""
        source = self.context.artifacts.get(state["hand"]).decode()
        parent = str(self.context.input.get("parent", ""))
        numbers = [t["number"] for t in state["tries"] if parent and t["candidate"] == parent]
        draft = Draft(source=source, words="edited by hand")
        return {"draft": _drafted(draft, "hand", numbers[-1] if numbers else None)}

    def specialise(self, state: State) -> dict[str, Any]:
        """Write the candidate from the family's template."""
        result = self._run_stage("generate")
        source = self.context.artifacts.get(result["candidate"]["digest"]).decode()
        return {
            "generated": result,
            "draft": _drafted(Draft(source=source, words=result["template"]), "template", None),
        }

    def write(self, state: State) -> dict[str, Any]:
        """Have a candidate written or repaired."""
        move = Move.model_validate(state["move"])
        sources = {
            t["candidate"]: self.context.artifacts.get(t["candidate"]).decode()
            for t in state["tries"]
            if t["candidate"] and t["number"] == move.target
        }
        try:
            draft = self.policy.write(move, self._search(state), sources)
        except Problem as problem:
            return {"draft": {}, "stopped": self._stop(problem)}
        return {"draft": _drafted(draft, "author" if move.action == "write" else "repairer", move.target)}

    def check(self, state: State) -> dict[str, Any]:
        """Climb the checks before the judge; what stands highest is chosen next.

        Raises:
            Problem: ``candidate-invalid``: a template's candidate is no kernel module, and nobody can repair it.
        """
        written = state["draft"]
        if not written:
            return {}
        draft, origin = Draft.model_validate(written["draft"]), written["origin"]
        one = Try(
            number=len(state["tries"]) + 1,
            parent=written["parent"],
            origin=origin,
            words=draft.words,
            entry=draft.entry,
        )
        begin = time.monotonic()
        if not draft.source:
            one.reasons = [draft.words]
        elif origin == "template":
            one.candidate = state["generated"]["candidate"]["digest"]
            one.reasons = template_findings(draft.source)
            one.rung = RUNGS.index("composes") if one.reasons else TOP
            if one.reasons and not self.policy.writes:
                raise Problem("candidate-invalid", one.reasons[0].split(": ", 1)[-1], "; ".join(one.reasons[:5]))
        else:
            self._climb(one, draft, state["spec"])
        tries = [*state["tries"], one.model_dump()]
        self._learn(one, state)
        stopped = self._charge("check", f"try {one.number}", time.monotonic() - begin, 0.0, one.model_dump())
        return {"tries": tries, "draft": {}, "stopped": stopped or state["stopped"]}

    def _climb(self, one: Try, draft: Draft, spec: dict[str, Any]) -> None:
        # Imported here: it pulls in torch, and the graph itself must be cheap to import.
        from agents.ladder import climb
        from kernel_templates.registry import load_spec

        found = climb(
            draft.source, draft.decomposition, load_spec(spec), unsafe=self.context.settings.unsafe_no_sandbox
        )
        source = found.source or draft.source
        name = f"try_{one.number}_{self.context.key}.py"
        one.candidate = self.context.save(name, source.encode(), "text/x-python").digest
        one.rung, one.passed, one.share, one.reasons = found.rung, found.passed, found.share, found.reasons

    def _learn(self, one: Try, state: State) -> None:
        """A repair that climbs higher is a lesson: what was wrong, and what it was."""
        parent = next((t for t in state["tries"] if t["number"] == one.parent), None)
        if parent is not None and parent["reasons"] and one.rung > parent["rung"]:
            wrong, cause = parent["reasons"][0][:LESSON_PART], one.words[:LESSON_PART]
            self.policy.learn(state["spec"]["family"], f"{wrong} -> {cause}")

    def submit(self, state: State) -> dict[str, Any]:
        """Hand the chosen try to the judge's step."""
        target = next(t for t in state["tries"] if t["number"] == state["move"]["target"])
        if target["origin"] == "template":
            return {"result": state["generated"], "outcome": self._end("judge", state["move"]["reason"])}
        from kernel_templates.registry import load_spec

        spec = load_spec(state["spec"])
        source = self.context.artifacts.get(target["candidate"])
        candidate = self.context.save(f"{spec.family}_{self.context.key}.py", source, "text/x-python")
        kernels = kernels_in(source.decode())
        result = GenerateResult(
            summary=f"{len(kernels)} kernels, written in {len(state['tries'])} tries: {spec.words()}",
            spec=spec.to_dict(),
            words=spec.words(),
            candidate=candidate,
            template=f"{target['origin']}, try {target['number']}",
            lines=source.count(b"\n"),
            kernels=kernels,
            entry={"forward": "forward", "backward": "backward"},
        )
        return {"result": result.model_dump(mode="json"), "outcome": self._end("judge", state["move"]["reason"])}

    def give_up(self, state: State) -> dict[str, Any]:
        """End without a candidate; the operator stays with what serves it today."""
        return {"outcome": self._end("gave_up", state["move"]["reason"])}

    # ---- judge and tune ------------------------------------------------------------------------------------------

    def judge(self, state: State) -> dict[str, Any]:
        """Have the candidate judged."""
        begin = time.monotonic()
        result = self._run_stage("judge")
        seconds = time.monotonic() - begin
        facts = {name: result.get(name) for name in ("outcome", "summary", "reasons", "candidate", "level", "device")}
        stopped = self._charge("judge", "", seconds, seconds if result["level"] == "compiled" else 0.0, facts)
        return {"result": result, "stopped": stopped or state["stopped"]}

    def decide(self, state: State) -> dict[str, Any]:
        """Accept, or let the policy choose between another candidate and giving up."""
        verdict = JudgeResult.model_validate(state["result"])
        entry = {"attempt": state["attempt"], "outcome": verdict.outcome, "reasons": verdict.reasons}
        verdicts = [*state["verdicts"], entry]
        if verdict.outcome == "accepted":
            return {"verdicts": verdicts, "outcome": self._end("accepted")}
        passed = sum(case.passed for case in verdict.cases) / max(1, len(verdict.cases))
        told = {"refused": True, "reasons": verdict.reasons[:8], "passed": passed, "share": verdict.worst_share}
        tries = [t | told if t["candidate"] == verdict.candidate else t for t in state["tries"]]
        move = self.policy.next_move(self._search(State(**{**state, "verdicts": verdicts, "tries": tries})))
        decision = "give_up" if move.action == "give_up" else "repair"
        result = verdict.model_copy(update={"next_move": decision}).model_dump(mode="json")
        return {"verdicts": verdicts, "tries": tries, "result": result, "outcome": self._end(decision, move.reason)}

    def tune(self, state: State) -> dict[str, Any]:
        """Search launch configurations of the accepted candidate."""
        begin = time.monotonic()
        result = self._run_stage("tune")
        seconds = time.monotonic() - begin
        self._charge("tune", "", seconds, seconds, {"summary": result.get("summary"), "rows": result.get("rows")})
        return {"result": result | {"next_change": self._analysed(state, result)}, "outcome": self._end("tuned")}

    def _analysed(self, state: State, result: dict[str, Any]) -> dict[str, Any] | None:
        """The change that an analyst would make next, kept as a lesson for later searches in the family."""
        row = next((r for r in self._gaps()["rows"] if r["digest"] == self.context.key), None)
        if not self.policy.writes or row is None or not result["rows"]:
            return None
        timed = [r | {"ms": r["forward_ms"] + r["backward_ms"]} for r in result["rows"]]
        candidate = GenerateResult.model_validate(self.context.load_result("generate", self.context.key))
        one = Tuned(
            digest=self.context.key,
            words=candidate.words,
            source=self.context.artifacts.get(candidate.candidate.digest).decode(),
            share_of_step=float(row.get("share_time") or 0.0),
            milliseconds=timed[0]["ms"],
            floor_ms=float(row.get("floor_ms") or 0.0) / max(1, int(row.get("calls") or 1)),
            rows=timed[:8],
        )
        found = self.policy.analyse([one], state["attempt"])
        if found is None:
            return None
        change = found[1]
        said = f"timed at {one.milliseconds:.3g} ms, floor {one.floor_ms:.3g}; "
        said += f"the analyst expects {change.expected_ms:.3g}"
        self.policy.learn(state["spec"]["family"], f"{said} from: {change.words[:LESSON_PART]}")
        return change.model_dump(mode="json")

    def _gaps(self) -> dict[str, Any]:
        return self.context.load_result("gaps", "") or {"rows": []}

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: str) -> dict[str, Any]:
        # Imported here: stages pull in torch, and the graph itself must be cheap to import.
        module = importlib.import_module(f"onboarding.stages.{stage}.stage")
        result: StageResult = module.run(self.context)
        return result.model_dump(mode="json")

    def _search(self, state: State) -> SearchState:
        return SearchState(
            spec=state["spec"],
            attempt=state["attempt"],
            verdicts=state["verdicts"],
            tries=[Try.model_validate(t) for t in state["tries"]],
            lessons=state["lessons"],
            stopped=state["stopped"],
        )

    def _charge(self, role: str, what: str, wall_s: float, gpu_s: float, facts: dict[str, Any]) -> str:
        """Write into the ledger what was taken; why nothing more may be spent, or an empty text."""
        call = ":".join(filter(None, [role, self.context.stage, self.context.key, str(self.context.attempt), what]))
        try:
            self.policy.charge(Spending(role=role, call=call, gpu_s=gpu_s, wall_s=wall_s, facts=facts))
        except Problem as problem:
            return self._stop(problem)
        return ""

    def _stop(self, problem: Problem) -> str:
        if problem.kind not in SPENT:
            raise problem
        return f"{problem.title}: {problem.detail}"[:600]

    def _end(self, decision: str, reason: str = "") -> dict[str, Any]:
        return {
            "stage": self.context.stage,
            "attempt": self.context.attempt,
            "decision": decision,
            "reason": reason,
        }


def _drafted(draft: Draft, origin: Origin, parent: int | None) -> dict[str, Any]:
    return {"draft": draft.model_dump(), "origin": origin, "parent": parent}


def template_findings(source: str) -> list[str]:
    """What has no place in a kernel module, with lines. A filter only: acceptance is the judge's alone."""
    # Imported here: it looks at torch to tell its functions from its submodules.
    from onboarding.stages.judge.structure import findings

    return [str(finding) for finding in findings(source.encode())]
