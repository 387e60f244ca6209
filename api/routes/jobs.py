"""Jobs: submit, list, look, cancel, retry."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from api import idempotency
from api.definitions import JobRequest, Submission, read_submission
from api.deps import OwnedJob, Owner, Services, ServicesDep, StageName
from api.errors import ERROR_RESPONSES
from api.views import JobDetail, JobPage, StageDetail, job_detail, job_view, newest_attempts, stage_views, step_detail
from onboarding.pipeline import JobState
from onboarding.records import Job
from workers.app import hint

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERROR_RESPONSES)

SUBMIT_ROUTE = "POST /v1/jobs"
SUBMIT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": JobRequest.model_json_schema(ref_template="#/components/schemas/{model}")},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "name": {"type": "string"},
                        "options": {"type": "string", "description": "JobOptions as JSON"},
                    },
                }
            },
        },
    }
}


def detail_of(services: Services, job: Job) -> JobDetail:
    """A job with its stages, read now."""
    return job_detail(job, services.store.steps(job.id), services.store.latest_progress(job.id))


def create(services: Services, owner: str, submission: Submission) -> JobDetail:
    """Store the definition, then the job: a crash in between leaves an unused artifact, never half a job."""
    ref = services.artifacts.put(submission.content, name=submission.file_name, media_type=submission.media_type)
    job = services.store.create_job(
        name=submission.name,
        model_type=submission.model_type,
        owner=owner,
        definition=ref.digest,
        options=submission.options,
    )
    hint(services.store, job.id)
    return detail_of(services, job)


@router.post("", status_code=202, response_model=JobDetail, openapi_extra=SUBMIT_BODY)
async def submit_job(
    request: Request,
    owner: Owner,
    services: ServicesDep,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JSONResponse:
    """Submit a model definition: an example, a configuration, files, or an archive."""
    submission = await read_submission(request)

    def act() -> dict[str, Any]:
        return create(services, owner, submission).model_dump(mode="json")

    body = await run_in_threadpool(
        idempotency.once, services.store, owner, SUBMIT_ROUTE, idempotency_key, submission.digest, act
    )
    return JSONResponse(body, 202, {"Location": body["links"]["self"]})


@router.get("", response_model=JobPage)
def list_jobs(
    owner: Owner,
    services: ServicesDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(pattern="^[0-9A-Z]{26}$")] = None,
    state: JobState | None = None,
    name: Annotated[str | None, Query(max_length=128)] = None,
) -> JobPage:
    """Your jobs, newest first."""
    found = services.store.list_jobs(owner, cursor=cursor, limit=limit, state=state, name=name)
    return JobPage(jobs=[job_view(job) for job in found.jobs], next=found.next_cursor)


@router.get("/{job_id}", response_model=JobDetail)
def get_job(job: OwnedJob, services: ServicesDep) -> JobDetail:
    """One job with its stages."""
    return detail_of(services, job)


@router.get("/{job_id}/stages/{stage}", response_model=StageDetail)
def get_stage(job: OwnedJob, stage: StageName, services: ServicesDep) -> StageDetail:
    """One stage with its results: one entry for the stage, or one for each operator."""
    steps = services.store.steps(job.id)
    row = next(row for row in stage_views(steps, services.store.latest_progress(job.id)) if row.stage == stage)
    results = [step_detail(step) for step in newest_attempts(steps) if step.stage == stage]
    return StageDetail(**row.model_dump(), results=results)


@router.post("/{job_id}/cancel", status_code=202, response_model=JobDetail)
def cancel_job(job: OwnedJob, services: ServicesDep) -> JobDetail:
    """Ask a job to stop; running steps are ended within seconds. 409 if it has already ended otherwise."""
    return detail_of(services, services.store.request_cancel(job.id))


@router.post("/{job_id}/retry", status_code=202, response_model=JobDetail)
def retry_job(job: OwnedJob, services: ServicesDep) -> JobDetail:
    """Go on from the stage that failed or was cancelled; what succeeded is not repeated."""
    again = services.store.retry(job.id)
    hint(services.store, job.id)
    return detail_of(services, again)
