"""Static files: our own, and htmx out of the package that carries it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from api.dashboard.render import static_files
from api.errors import not_found

router = APIRouter(include_in_schema=False)

MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@router.get("/static/{name}")
def static_file(name: str) -> Response:
    """One static file. Addresses carry the content's digest, so browsers may keep it."""
    path = static_files().get(name)
    if path is None:
        raise not_found("file")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(path.read_bytes(), media_type=MEDIA[path.suffix], headers=headers)
