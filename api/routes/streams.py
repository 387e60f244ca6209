"""What is followed while a job runs: its events (SSE) and its logs (by byte offset)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import PlainTextResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from api.deps import OwnedJob, ServicesDep, StageName
from api.errors import ERROR_RESPONSES
from api.logs import read_chunk
from onboarding.problem import Problem
from onboarding.store import log_path

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["streams"], responses=ERROR_RESPONSES)


def resume_after(last_event_id: Annotated[str | None, Header()] = None, after: Annotated[int, Query(ge=0)] = 0) -> int:
    """The event number to go on from: the browser's Last-Event-ID wins over ``after``."""
    if last_event_id is None:
        return after
    if not last_event_id.isdecimal() or len(last_event_id) > 18:
        raise Problem("invalid-request", "Last-Event-ID must be an event number", field="Last-Event-ID", status=400)
    return int(last_event_id)


@router.get("/events", response_class=EventSourceResponse)
async def follow_events(
    job: OwnedJob,
    services: ServicesDep,
    start: Annotated[int, Depends(resume_after)],
) -> AsyncIterator[ServerSentEvent]:
    """Events from the one after Last-Event-ID (or ``after``), live; ``end`` says that the job has ended."""
    async with contextlib.aclosing(services.tailers.events(job.id, start)) as events:
        async for event in events:
            yield ServerSentEvent(id=str(event.seq), event=event.kind, data=event)
    yield ServerSentEvent(event="end", data={})


@router.get("/logs/{stage}", response_class=PlainTextResponse)
def read_log(
    job: OwnedJob,
    stage: StageName,
    services: ServicesDep,
    key: Annotated[str, Query(pattern="^[0-9a-f]{0,64}$")] = "",
    offset: Annotated[int, Query(ge=-(2**31), le=2**40)] = 0,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    download: bool = False,
) -> PlainTextResponse:
    """A part of a log as text; ``Onboard-Next-Offset`` says where to go on. A negative offset counts from the end."""
    if attempt is None:
        steps = services.store.steps(job.id)
        attempt = max((step.attempt for step in steps if step.stage == stage and step.key == key), default=1)
    chunk = read_chunk(log_path(services.settings, job.id, stage, key, attempt), offset)
    headers = {"Onboard-Next-Offset": str(chunk.next_offset), "Onboard-Log-Size": str(chunk.size)}
    if download:
        headers["Content-Disposition"] = f'attachment; filename="{stage}{key and "-" + key[:12]}.log"'
    return PlainTextResponse(chunk.text, headers=headers)
