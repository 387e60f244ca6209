"""Artifacts of a job, served as downloads that a browser never renders."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from api.deps import OwnedJob, ServicesDep
from api.errors import ERROR_RESPONSES, not_found
from api.security import DOWNLOAD_CSP
from api.views import ArtifactView, artifact_view
from onboarding.problem import Problem

router = APIRouter(prefix="/v1/jobs/{job_id}/artifacts", tags=["artifacts"], responses=ERROR_RESPONSES)


def download_name(name: str) -> str:
    """A file name that is safe in a header and on disk."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name.rsplit("/", 1)[-1]).lstrip(".") or "artifact"


@router.get("", response_model=list[ArtifactView])
def list_artifacts(job: OwnedJob, services: ServicesDep) -> list[ArtifactView]:
    """Everything the job stored, in order."""
    return [artifact_view(row) for row in services.store.artifacts(job.id)]


@router.get("/{digest}", response_class=Response)
def get_artifact(
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], job: OwnedJob, services: ServicesDep
) -> Response:
    """The content of one artifact; its digest is verified before a byte is sent."""
    row = services.store.artifact_of(job.id, digest)
    if row is None:
        raise not_found("artifact")
    try:
        content = services.artifacts.get(digest)
    except FileNotFoundError:
        raise Problem("artifact-missing", f"{row.name} is gone from the store", digest, status=410) from None
    except ValueError as error:
        raise Problem("artifact-damaged", f"{row.name} is damaged in the store", str(error), status=500) from None
    return Response(
        content,
        media_type=row.media_type,
        headers={
            "Content-Disposition": f'attachment; filename="{download_name(row.name)}"',
            "Content-Security-Policy": DOWNLOAD_CSP,
            "ETag": f'"{digest}"',
            "Cache-Control": "private, max-age=31536000, immutable",
        },
    )
