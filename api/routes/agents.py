"""A job's agents: ledger, approvals, and candidates edited by hand."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from api.agents import AgentView, Candidate, Decision, LedgerDetail, agent_view, ledger_detail
from api.deps import OwnedJob, Owner, Services, ServicesDep
from api.errors import ERROR_RESPONSES, not_found
from api.routes.jobs import detail_of
from api.views import JobDetail
from onboarding.records import Job
from onboarding.stages.generate.result import GenerateResult
from workers.app import hint

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["agents"], responses=ERROR_RESPONSES)
Digest = Annotated[str, Path(pattern="^[0-9a-f]{8,64}$")]


@router.get("/agent", response_model=AgentView)
def get_agent(job: OwnedJob, services: ServicesDep) -> AgentView:
    """What the job's agents asked, what it cost, and what waits for a person."""
    return agent_view(services.store.ledger(job.id), services.store.steps(job.id))


@router.get("/agent/{entry_id}", response_model=LedgerDetail)
def get_entry(job: OwnedJob, entry_id: int, services: ServicesDep) -> LedgerDetail:
    """One entry of the ledger with its prompt and its answer."""
    entry = services.store.ledger_entry(job.id, entry_id)
    if entry is None:
        raise not_found("ledger entry")
    return ledger_detail(entry)


@router.post("/approvals", status_code=202, response_model=JobDetail)
def decide(job: OwnedJob, decision: Decision, owner: Owner, services: ServicesDep) -> JobDetail:
    """Approve or decline a step that waits; 409 if none does."""
    return detail_of(services, decided(services, job, decision, owner))


@router.put("/kernels/{digest}/candidate", status_code=202, response_model=JobDetail)
def resubmit(job: OwnedJob, digest: Digest, candidate: Candidate, owner: Owner, services: ServicesDep) -> JobDetail:
    """Submit an edited candidate for an operator: it is checked, judged, aligned and packaged like any other."""
    return detail_of(services, resubmitted(services, job, digest, candidate.source, owner))


def decided(services: Services, job: Job, decision: Decision, owner: str) -> Job:
    """Carry out a decision."""
    after = services.store.decide(job.id, decision.stage, decision.key, approve=decision.approve, by=owner)
    hint(services.store, job.id)
    return after


def resubmitted(services: Services, job: Job, digest: str, source: str, owner: str) -> Job:
    """Store an edited candidate and have it worked on."""
    newest = services.store.load_result(job.id, "generate", digest)
    parent = GenerateResult.model_validate(newest).candidate.digest if newest else ""
    text = source.replace("\r\n", "\n")
    ref = services.artifacts.put(text.encode(), name=f"edited_{digest}.py", media_type="text/x-python")
    try:
        after = services.store.resubmit(job.id, digest, ref.digest, parent=parent, by=owner)
    except LookupError:
        raise not_found("kernel") from None
    hint(services.store, job.id)
    return after
