"""Templates: one environment, autoescaping always on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from api.dashboard import formats
from onboarding.pictures.blocks import block_diagram
from onboarding.pictures.strip import colours, layer_strip

HERE = Path(__file__).parent
STATIC = HERE / "static"


@lru_cache(maxsize=1)
def static_files() -> dict[str, Path]:
    """Everything that may be served, by name: a list made once, so that no path of a request is ever opened."""
    spec = find_spec("js_lib_htmx")  # the import name of django-js-lib-htmx; nothing of Django is needed
    assert spec is not None
    assert spec.origin is not None
    htmx = Path(spec.origin).parent / "static" / "htmx" / "htmx.min.js"
    return {path.name: path for path in (*STATIC.iterdir(), htmx)}


@lru_cache(maxsize=64)
def asset(name: str) -> str:
    """Address of a static file, with its content's digest so that browsers may keep it for ever."""
    digest = hashlib.sha256(static_files()[name].read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The Jinja environment with the filters of :mod:`api.dashboard.formats`."""
    env = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        formats.count,
        formats.flops,
        formats.size,
        formats.duration,
        formats.milliseconds,
        formats.percent,
        formats.scientific,
        formats.clock,
    ):
        env.filters[function.__name__] = function
    env.filters["state_word"] = lambda state: formats.STATE_WORDS.get(state, state)
    env.filters["map_product"] = lambda blocks, name: [getattr(block, name) * len(block.layers) for block in blocks]
    env.globals["asset"] = asset
    env.globals["layer_strip"] = lambda architecture: Markup(layer_strip(architecture))
    env.globals["block_diagram"] = lambda architecture: Markup(block_diagram(architecture))
    env.globals["strip_colours"] = colours
    return env


def page(
    request: Request,
    template: str,
    context: dict[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Render a page. Pages show live state and another key's page must never come from a cache: no-store."""
    body = environment().get_template(template).render(request_path=request.url.path, **context)
    return HTMLResponse(body, status, {"Cache-Control": "no-store", **(headers or {})})
