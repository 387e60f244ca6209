"""Annotated dependencies of the routes: services of the application, the caller, and the job in the path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request

from api.auth import authenticate
from api.errors import not_found
from api.metrics import Metrics
from api.tail import Tailers
from onboarding.artifacts import ArtifactStore
from onboarding.pipeline import STAGE_BY_NAME
from onboarding.records import Job
from onboarding.settings import Settings
from onboarding.store import Store


@dataclass(frozen=True)
class Services:
    """What the application holds for its whole life."""

    settings: Settings
    store: Store
    artifacts: ArtifactStore
    tailers: Tailers
    metrics: Metrics


def services_of(request: Request) -> Services:
    """The application's services."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]


def caller(request: Request, services: ServicesDep) -> str:
    """The owner id of the caller; raises 401."""
    return authenticate(request, services.store)


Owner = Annotated[str, Depends(caller)]


def path_job(job_id: Annotated[str, Path(max_length=64)], owner: Owner, services: ServicesDep) -> Job:
    """The job in the path, if it is the caller's; else 404, whether or not it exists."""
    job = services.store.get_job(job_id, owner)
    if job is None:
        raise not_found("job")
    return job


OwnedJob = Annotated[Job, Depends(path_job)]


def path_stage(stage: Annotated[str, Path(max_length=32)]) -> str:
    """The stage in the path; 404 if the pipeline has none of that name."""
    if stage not in STAGE_BY_NAME:
        raise not_found("stage")
    return stage


StageName = Annotated[str, Depends(path_stage)]
