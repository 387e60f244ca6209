"""``onboard agent``: what a job's agents spend, what waits for you, and candidates that you edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli import output

agent = typer.Typer(help="A job's agents: cost, approvals, candidates edited by hand.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="Id of a job; 'last' is your newest one.")]
Key = Annotated[str, typer.Argument(help="Digest of the operator; nothing for a stage of the whole job.")]


def _call(job: str, method: str, path: str, **request: Any) -> Any:
    from api.cli.main import connect, resolve

    client = connect()
    return client.call(method, f"/v1/jobs/{resolve(client, job)}/{path}", **request)


@agent.command()
def show(job: JobId = "last", as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """What the agents spent by role, and what waits for you."""
    found = _call(job, "GET", "agent")
    if as_json:
        output.console().print_json(data=found)
        return
    for role, s in found["by_role"].items():
        output.say(
            f"{role:10} {s['calls']:4} calls {s['tokens']:10,} tokens {s['money']:9.4f} USD {s['wall_s']:8.1f} s"
        )
    for waiting in found["waiting"]:
        output.say(f"waits for you: {waiting['stage']} {waiting['key']}".rstrip())
    if not found["by_role"] and not found["waiting"]:
        output.tell("no language model took part, and nothing waits for you")


@agent.command()
def approve(job: JobId, stage: str, key: Key = "") -> None:
    """Let a step that waits for you run."""
    _call(job, "POST", "approvals", json={"stage": stage, "key": key, "approve": True})
    output.say(f"{stage} {key} runs".replace("  ", " "))


@agent.command()
def decline(job: JobId, stage: str, key: Key = "") -> None:
    """Skip a step that waits for you."""
    _call(job, "POST", "approvals", json={"stage": stage, "key": key, "approve": False})
    output.say(f"{stage} {key} is skipped".replace("  ", " "))


@agent.command()
def candidate(job: JobId, key: Annotated[str, typer.Argument(help="Digest of the operator.")], source: Path) -> None:
    """Submit an edited candidate; it is checked and judged like any other."""
    _call(job, "PUT", f"kernels/{key}/candidate", json={"source": source.read_text()})
    output.say(f"{key} is worked on again")
