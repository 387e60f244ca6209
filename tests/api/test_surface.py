"""What others build on does not change by accident: routes and commands, frozen here."""

from __future__ import annotations

import subprocess
import sys

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from typer.main import get_command

ROUTES = """
GET /
GET /docs
GET /healthz
GET /jobs/{job_id}
GET /jobs/{job_id}/compare
GET /jobs/{job_id}/kernels/{digest}
GET /jobs/{job_id}/pictures/{name}.svg
GET /metrics
GET /readyz
GET /signin
GET /static/{name}
GET /v1/examples
GET /v1/jobs
GET /v1/jobs/{job_id}
GET /v1/jobs/{job_id}/agent
GET /v1/jobs/{job_id}/agent/{entry_id}
GET /v1/jobs/{job_id}/artifacts
GET /v1/jobs/{job_id}/artifacts/{digest}
GET /v1/jobs/{job_id}/events
GET /v1/jobs/{job_id}/logs/{stage}
GET /v1/jobs/{job_id}/stages/{stage}
POST /jobs
POST /jobs/{job_id}/approvals
POST /jobs/{job_id}/cancel
POST /jobs/{job_id}/kernels/{digest}/candidate
POST /jobs/{job_id}/retry
POST /signout
POST /v1/jobs
POST /v1/jobs/{job_id}/approvals
POST /v1/jobs/{job_id}/cancel
POST /v1/jobs/{job_id}/retry
POST /v1/signin-links
PUT /v1/jobs/{job_id}/kernels/{digest}/candidate
"""

COMMANDS = """
agent approve: job stage key
agent candidate: job key source
agent decline: job stage key
agent show: job --json
bundle pull: job --to --replace
bundle verify: path --key
cancel: job
demo: --to --profile
diff: before after --sequence-length --all --json
doctor: --json --llm
finetune: bundle --data --weights --twin --output --steps --sequence-length --batch --microbatch --lr \
--rank --target --full --ranks --ep --device --kernels --key --set --dry-run
jobs: --state --limit --json
judge: candidate --spec --seed --cases --device --unsafe-no-sandbox --json
parse: what --sequence-length --target --json
report: job --out --open
retry: job --watch
serve:
signin: page
stop:
submit: what --profile --name --device --target --sequence-length --nodes --devices-per-node --policy --approve --watch
watch: job
"""


def test_routes(app: FastAPI) -> None:
    found = {
        f"{method} {context.path}"
        for context in iter_route_contexts(app.routes)
        for method in (context.methods or set()) - {"HEAD"}
        if context.path != "/v1/openapi.json"
    }
    assert found == set(ROUTES.split("\n")) - {""}


def test_commands() -> None:
    from api.cli.main import app

    lines = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        subcommands = getattr(command, "commands", None)
        named = [(name, command)] if subcommands is None else [(f"{name} {s}", c) for s, c in subcommands.items()]
        for full, each in named:
            words = [max(parameter.opts, key=len) for parameter in each.params]
            lines.append(f"{full}: {' '.join(words)}".rstrip())
    assert sorted(lines) == sorted(filter(None, COMMANDS.split("\n")))


def test_the_command_line_reaches_neither_torch_nor_the_service() -> None:
    heavy = ("torch", "triton", "fastapi", "celery", "httpx", "rich.live")
    code = f"import sys, api.cli.main; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_api_never_imports_torch() -> None:
    code = "import sys, api.app; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
