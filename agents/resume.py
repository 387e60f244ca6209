"""Running a graph to its explicit outcome, from wherever a killed process left it."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from onboarding.problem import Problem

STEPS_AT_MOST = 500


def run_to_end(
    graph: CompiledStateGraph[Any, Any, Any, Any], config: RunnableConfig, begin: Any, attempt: int
) -> dict[str, Any]:
    """The final state of this attempt: as stored, else run on from the last finished node, else run from the start.

    A snapshot with nothing next proves nothing (a kill between two checkpoint writes makes one): only ``outcome`` does.

    Raises:
        Problem: ``graph-without-outcome``.
    """
    config = {**config, "recursion_limit": STEPS_AT_MOST}
    stored = graph.get_state(config).values
    same = bool(stored) and stored.get("attempt") == attempt
    if same and _ended(stored, attempt):
        return dict(stored)
    # durability "sync": a node's answer is on disk before the next node starts, so a kill cannot lose it
    final = graph.invoke(None if same else begin, config, durability="sync")
    if same and not _ended(final, attempt):
        final = graph.invoke(begin, config, durability="sync")
    if not _ended(final, attempt):
        raise Problem("graph-without-outcome", "an agent's graph ended without an outcome", "run the step again")
    return dict(final)


def _ended(state: dict[str, Any], attempt: int) -> bool:
    outcome = state.get("outcome")
    return outcome is not None and bool(outcome["attempt"] == attempt)
