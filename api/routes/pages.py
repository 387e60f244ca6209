"""The dashboard's pages. Each is one route; live parts are refreshed out of the same page."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Path, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from api.agents import Decision
from api.dashboard.facts import JobFacts, Kernel
from api.dashboard.gantt import gantt
from api.dashboard.pictures import PICTURES
from api.dashboard.render import page
from api.dashboard.source import python_html, template_source
from api.definitions import prepare
from api.deps import OwnedJob, Owner, Services, ServicesDep
from api.errors import not_found
from api.logs import LogChunk, read_chunk
from api.routes import agents as agent_routes
from api.routes import jobs as job_routes
from api.views import JobView, job_view
from onboarding.comparison import compare
from onboarding.examples import example_files, example_names
from onboarding.pipeline import PROFILES, STAGES, JobOptions
from onboarding.store import log_path
from workers.app import hint

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

TABS = {
    "model": "Model",
    "gaps": "Gaps",
    "kernels": "Kernels",
    "numerics": "Numerics",
    "training": "Training",
    "throughput": "Throughput",
    "scale": "Scale",
    "agent": "Agent",
    "artifacts": "Artifacts",
}
Tab = Literal["model", "gaps", "kernels", "numerics", "training", "throughput", "scale", "agent", "artifacts"]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{8,64}$")]
SIDEBAR_JOBS = 50
COMPARED = 12
LOG_TAIL = -48 * 1024


def sidebar(services: Services, owner: str, search: str = "", cursor: str | None = None) -> dict[str, Any]:
    """The job list at the left of every page."""
    found = services.store.list_jobs(owner, limit=SIDEBAR_JOBS, name=search or None, cursor=cursor)
    return {"jobs": [job_view(job) for job in found.jobs], "next_cursor": found.next_cursor, "search": search}


@router.get("/")
def home(
    request: Request,
    owner: Owner,
    services: ServicesDep,
    q: Annotated[str, Query(max_length=128)] = "",
    cursor: Annotated[str | None, Query(pattern="^[0-9A-Z]{26}$")] = None,
) -> HTMLResponse:
    """All jobs, and a form for the next one."""
    context = sidebar(services, owner, q, cursor)
    return page(request, "home.html", {**context, "job": None, "examples": example_names(), "profiles": list(PROFILES)})


@router.post("/jobs")
def submit(
    owner: Owner,
    services: ServicesDep,
    example: Annotated[str, Form(max_length=128)],
    profile: Annotated[Literal["quick", "standard"], Form()] = "standard",
) -> RedirectResponse:
    """Submit an example from the form."""
    submission = prepare(example_files(example), example, JobOptions(profile=profile))
    return RedirectResponse(job_routes.create(services, owner, submission).links["page"], 303)


def chosen_stage(facts: JobFacts, stage: str | None) -> str:
    """The stage whose log is shown: the user's choice, else the running, the failed, or the last one reached."""
    if stage is not None and any(stage == known.name for known in STAGES):
        return stage
    views = facts.detail.stages
    for state in ("running", "failed", "ready"):
        for view in views:
            if view.state == state:
                return view.stage
    reached = [view.stage for view in views if view.state not in ("waiting", "skipped")]
    return reached[-1] if reached else STAGES[0].name


def log_of(services: Services, facts: JobFacts, stage: str, key: str | None) -> dict[str, Any]:
    """What the log pane shows."""
    steps = [step for step in facts.steps if step.stage == stage]
    words = {kernel.key: kernel.words for kernel in facts.kernels}
    keys = list(dict.fromkeys(step.key for step in steps))
    if key not in keys:
        telling = [step.key for state in ("running", "failed") for step in steps if step.state == state]
        key = (telling or keys[-1:] or [""])[0]
    attempt = max((step.attempt for step in steps if step.key == key), default=1)
    path = log_path(services.settings, facts.job.id, stage, key, attempt)
    chunk = read_chunk(path, LOG_TAIL) if steps else LogChunk("", 0, 0)
    options = [(known, words.get(known, known[:12])) for known in keys if known]
    ended = any(step.key == key and step.attempt == attempt and step.finished_at for step in steps)
    return {"stage": stage, "key": key, "attempt": attempt, "chunk": chunk, "options": options, "ended": ended}


def default_tab(facts: JobFacts) -> Tab:
    """The page opens on what is most telling by now."""
    return "training" if facts.align is not None else "kernels" if facts.gaps is not None else "model"


@router.get("/docs")
def docs(request: Request, owner: Owner, services: ServicesDep) -> HTMLResponse:
    """The API's routes, read off its own description."""
    operations = [
        {"method": method.upper(), "path": path, "text": operation.get("description", "")}
        for path, methods in request.app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    return page(request, "docs.html", {**sidebar(services, owner), "job": None, "operations": operations})


@router.get("/jobs/{job_id}")
def job_page(
    request: Request,
    job: OwnedJob,
    owner: Owner,
    services: ServicesDep,
    tab: Tab | None = None,
    stage: Annotated[str | None, Query(max_length=32)] = None,
    key: Annotated[str | None, Query(max_length=64)] = None,
) -> HTMLResponse:
    """One job."""
    facts = JobFacts(services.store, job, services.artifacts)
    shown = chosen_stage(facts, stage)
    context = {
        **sidebar(services, owner),
        "job": facts.detail,
        "facts": facts,
        "gantt": gantt(job, facts.steps, facts.detail.stages),
        "tabs": TABS,
        "tab": tab or default_tab(facts),
        "chosen": stage,
        "others": others(services, owner, job.id),
        "log": log_of(services, facts, shown, key),
    }
    return page(request, "job.html", context)


def others(services: Services, owner: str, job_id: str) -> list[JobView]:
    """The newest jobs of other models that an architecture can be compared with: those past parsing."""
    jobs = [job for job in services.store.list_jobs(owner, limit=SIDEBAR_JOBS).jobs if job.id != job_id]
    parsed = [job for job in jobs if services.store.load_result(job.id, "parse", "") is not None]
    return [job_view(job) for job in parsed[:COMPARED]]


@router.get("/jobs/{job_id}/kernels/{digest}")
def kernel_page(request: Request, job: OwnedJob, digest: Digest, owner: Owner, services: ServicesDep) -> HTMLResponse:
    """One operator's kernel: verdict, evidence, source."""
    facts = JobFacts(services.store, job)
    kernel = facts.kernel(digest)
    if kernel is None:
        raise not_found("kernel")
    context = {**sidebar(services, owner), "job": facts.detail, "kernel": kernel, **sources(services, kernel)}
    return page(request, "kernel.html", context)


@router.get("/jobs/{job_id}/compare")
def compare_page(
    request: Request,
    job: OwnedJob,
    owner: Owner,
    services: ServicesDep,
    other: Annotated[str, Query(alias="with", pattern="^[0-9A-Z]{26}$")],
) -> HTMLResponse:
    """What is new in this job's architecture against another one's."""
    base = services.store.get_job(other, owner)
    if base is None:
        raise not_found("job")
    facts, against = JobFacts(services.store, job), JobFacts(services.store, base)
    if facts.parse is None or against.parse is None:
        raise not_found("architecture")
    context = {
        **sidebar(services, owner),
        "job": facts.detail,
        "other": against.detail,
        "a": facts.parse.architecture,
        "b": against.parse.architecture,
        "comparison": compare(against.parse.architecture, facts.parse.architecture),
    }
    return page(request, "compare.html", context)


def sources(services: Services, kernel: Kernel) -> dict[str, Any]:
    """The candidate's source and its template's, highlighted."""
    if kernel.generate is None:
        return {"source": None, "text": None, "template": None}
    try:
        text = services.artifacts.get(kernel.generate.candidate.digest).decode("utf-8", "replace")
    except (FileNotFoundError, ValueError):
        text = None
    template = template_source(kernel.generate.template)
    return {
        "source": None if text is None else python_html(text),
        "text": text,
        "template": None if template is None else python_html(template),
    }


@router.get("/jobs/{job_id}/pictures/{name}.svg")
def picture(job: OwnedJob, name: str, services: ServicesDep) -> Response:
    """A chart of the job as SVG. Its own policy lets it style itself and do nothing else."""
    draw = PICTURES.get(name)
    svg = draw(JobFacts(services.store, job)) if draw is not None else None
    if svg is None:
        raise not_found("picture")
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
    return Response(svg, media_type="image/svg+xml", headers={**headers, "Cache-Control": "no-cache"})


@router.post("/jobs/{job_id}/approvals")
def approve(
    job: OwnedJob,
    owner: Owner,
    services: ServicesDep,
    stage: Annotated[str, Form(max_length=32)],
    decision: Annotated[Literal["approve", "decline"], Form()],
    key: Annotated[str, Form(max_length=64)] = "",
) -> RedirectResponse:
    """The approval buttons."""
    agent_routes.decided(services, job, Decision(stage=stage, key=key, approve=decision == "approve"), owner)
    return RedirectResponse(f"/jobs/{job.id}?tab=agent", 303)


@router.post("/jobs/{job_id}/kernels/{digest}/candidate")
def resubmit(
    job: OwnedJob,
    digest: Digest,
    owner: Owner,
    services: ServicesDep,
    source: Annotated[str, Form(max_length=256 * 1024)],
) -> RedirectResponse:
    """The edited candidate of a kernel's page."""
    agent_routes.resubmitted(services, job, digest, source, owner)
    return RedirectResponse(f"/jobs/{job.id}?tab=kernels", 303)


@router.post("/jobs/{job_id}/cancel")
def cancel(job: OwnedJob, services: ServicesDep) -> RedirectResponse:
    """The cancel button."""
    services.store.request_cancel(job.id)
    return RedirectResponse(f"/jobs/{job.id}", 303)


@router.post("/jobs/{job_id}/retry")
def retry(job: OwnedJob, services: ServicesDep) -> RedirectResponse:
    """The retry button."""
    services.store.retry(job.id)
    hint(services.store, job.id)
    return RedirectResponse(f"/jobs/{job.id}", 303)
