"""Which policy a step runs under, and on which budget."""

from __future__ import annotations

from typing import Any

from agents.llm.caller import Caller, Who
from agents.llm.endpoint import Endpoint, Sender
from agents.policy import LLMPolicy, for_operator
from onboarding.pipeline import JobOptions
from onboarding.policy import Policy, RulePolicy
from onboarding.problem import Problem
from onboarding.settings import Settings
from onboarding.store import BudgetLimits, Purse, Store


def policy_for(
    settings: Settings,
    store: Store,
    who: Who,
    options: JobOptions,
    gaps: dict[str, Any] | None,
    send: Sender | None = None,
) -> Policy:
    """The policy of one step.

    Args:
        who: the step, on whose account calls are made.
        gaps: the job's gap analysis, for an operator's share of the expected saving.
        send: carries requests; the OpenAI SDK by default.

    Raises:
        Problem: ``no-language-model``: the job asks for one and none is configured.
    """
    if options.policy == "rules" or (options.policy == "auto" and not settings.llm.configured):
        return RulePolicy()
    if not settings.llm.configured:
        raise Problem(
            "no-language-model",
            "the job asks for a language model and none is configured",
            "set ONBOARD_LLM_BASE_URL and ONBOARD_LLM_MODEL, or submit with policy rules",
        )
    caller = Caller(
        endpoint=Endpoint(settings.llm, send),
        store=store,
        who=who,
        settings=settings.llm,
        limits=limits_of(settings, options),
        memory=settings.resolved_home / "llm.json",
    )
    if not who.key:
        return LLMPolicy(caller)
    return LLMPolicy(for_operator(caller, saving_share(gaps, who.key), settings.step_wall_s))


def limits_of(settings: Settings, options: JobOptions) -> BudgetLimits:
    """The service's limits, narrowed by the job's own."""
    llm = settings.llm
    tokens = llm.job_tokens if options.max_tokens is None else min(llm.job_tokens, options.max_tokens)
    money = llm.job_money if options.max_money is None else min(llm.job_money, options.max_money)
    unlimited = float("inf")
    return BudgetLimits(
        job=Purse(tokens=tokens, money=money, gpu_s=llm.job_gpu_s, wall_s=llm.job_wall_s),
        project=Purse(tokens=llm.project_tokens, money=llm.project_money, gpu_s=unlimited, wall_s=unlimited),
        role_tokens=dict(llm.role_tokens),
        requests_per_minute=llm.requests_per_minute,
    )


def saving_share(gaps: dict[str, Any] | None, key: str) -> float:
    """An operator's share of what all gaps together could save of the step; equal shares where nothing is known."""
    wanted = set((gaps or {}).get("gaps", ()))
    rows = [row for row in (gaps or {}).get("rows", ()) if row.get("digest") in wanted]
    total = sum(float(row.get("saving_ms") or 0.0) for row in rows)
    if total <= 0:
        return 1.0 / max(1, len(rows))
    return sum(float(row.get("saving_ms") or 0.0) for row in rows if row["digest"] == key) / total
