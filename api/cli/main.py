"""``onboard``: submit, watch and take home. Exit codes: 0 done, 1 failed or refused, 2 usage, 3 partial (parse),
4 no service answers, 130 interrupted (a job goes on).
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli import output
from api.cli.agents import agent
from api.cli.finetune import finetune
from api.cli.judge import judge
from onboarding.problem import Problem

if TYPE_CHECKING:
    from api.cli.client import Client

app = typer.Typer(
    help="From a model's definition to verified, tuned, reusable kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 failed or refused, 2 usage, 3 partial (parse), 4 no service, 130 interrupted.",
)
bundle = typer.Typer(help="Fetch and verify bundles.", no_args_is_help=True)
app.add_typer(bundle, name="bundle")
app.add_typer(agent, name="agent")

JobId = Annotated[str, typer.Argument(help="Id of a job; 'last' is your newest one.")]
Profile = Annotated[str, typer.Option(help="quick or standard: how much is judged and trained.")]


opened = ExitStack()
"""Connections of this command; closed by :func:`main`."""


def connect() -> Client:
    """The client of the service in force."""
    from api.cli.client import Client
    from onboarding.settings import Settings

    return opened.enter_context(Client(Settings()))


def resolve(client: Client, job: str) -> str:
    """A job's id; ``last`` stands for the newest."""
    if job != "last":
        return job
    jobs = client.call("GET", "/v1/jobs", params={"limit": 1})["jobs"]
    if not jobs:
        raise Problem("not-found", "there are no jobs yet", "submit one: onboard submit kimi-linear", status=404)
    return str(jobs[0]["id"])


def watch_until_end(client: Client, job_id: str) -> dict[str, Any]:
    """Follow a job; leaving it with Ctrl-C does not stop it."""
    from api.cli.live import Watcher

    try:
        return Watcher(client, output.console()).follow(job_id)
    except KeyboardInterrupt:
        output.tell(f"\nthe job goes on; come back with: onboard watch {job_id}")
        raise typer.Exit(output.INTERRUPTED) from None


def conclude(client: Client, job: dict[str, Any]) -> None:
    """Say how a job ended, and exit accordingly."""
    if job["state"] == "succeeded":
        return
    if job["problem"]:
        output.show_problem(Problem.from_dict(job["problem"]))
    else:
        output.tell(f"the job was {job['state']}")
    stage = (job["problem"] or {}).get("stage")
    if stage:
        output.tell(f"evidence  {client.url}{job['links']['page']}?stage={stage}")
    output.tell(f"go on     onboard retry {job['id']}")
    raise typer.Exit(output.FAILED)


@app.command()
def serve() -> None:
    """Run the service here: API, dashboard, worker and broker. Stops with Ctrl-C."""
    from onboarding.settings import Settings
    from workers.embedded import serve as run

    raise typer.Exit(run(Settings()))


@app.command()
def stop() -> None:
    """Stop the service that runs on this home."""
    from api.cli.service import stop as stop_service
    from onboarding.settings import Settings

    output.say(stop_service(Settings()))


@app.command()
def submit(
    what: Annotated[str, typer.Argument(help="A config.json, a folder, an archive, or the name of an example.")],
    profile: Profile = "standard",
    name: Annotated[str | None, typer.Option(help="What to call the model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where kernels are judged and aligned.")] = "auto",
    target: Annotated[str, typer.Option(help="Device whose roofline ranks the gaps.")] = "h200",
    sequence_length: Annotated[int, typer.Option(help="Tokens at which FLOPs and bytes are counted.")] = 8192,
    nodes: Annotated[int, typer.Option(help="Nodes that the scale stage plans for.")] = 16,
    devices_per_node: Annotated[int, typer.Option(help="Devices that share one fast fabric.")] = 8,
    policy: Annotated[str, typer.Option(help="auto, rules or llm: who writes candidates.")] = "auto",
    approve: Annotated[list[str] | None, typer.Option(help="A stage that waits for you: generate, package.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
) -> None:
    """Submit a model definition; prints the job's id."""
    client = connect()
    options = {"profile": profile, "device": device, "target": target, "sequence_length": sequence_length}
    options |= {"policy": policy, "approve": approve or [], "nodes": nodes, "devices_per_node": devices_per_node}
    job = client.submit(what, name=name, options=options)
    if not watch:
        output.say(job["id"])
        output.tell(f"watch: onboard watch {job['id']}   or {client.url}{job['links']['page']}")
        return
    output.say(f"submitted {job['name']} as job {job['id']}  (POST /v1/jobs -> 202)\n")
    conclude(client, watch_until_end(client, job["id"]))


@app.command()
def watch(job: JobId = "last") -> None:
    """Follow a job until it ends: one row a stage."""
    client = connect()
    conclude(client, watch_until_end(client, resolve(client, job)))


@app.command()
def jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List your jobs, newest first."""
    from api.cli.tables import jobs_table

    params = {"limit": limit, **({"state": state} if state else {})}
    found = connect().call("GET", "/v1/jobs", params=params)
    if as_json:
        output.console().print_json(data=found)
    elif not found["jobs"]:
        output.tell("no jobs yet; submit one: onboard submit kimi-linear --watch")
    else:
        output.console().print(jobs_table(found["jobs"]))


@app.command()
def cancel(job: JobId) -> None:
    """Stop a job; what it has made is kept."""
    client = connect()
    answer = client.call("POST", f"/v1/jobs/{resolve(client, job)}/cancel")
    output.say(f"{answer['id']} {'is being cancelled' if answer['state'] == 'running' else 'is ' + answer['state']}")


@app.command()
def retry(job: JobId, watch: Annotated[bool, typer.Option("--watch", "-w")] = False) -> None:
    """Go on with a failed or cancelled job from the stage where it stopped."""
    client = connect()
    answer = client.call("POST", f"/v1/jobs/{resolve(client, job)}/retry")
    output.say(f"{answer['id']} goes on")
    if watch:
        conclude(client, watch_until_end(client, answer["id"]))


@app.command()
def report(
    job: JobId = "last",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it here instead of ./<model>-report.html.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Fetch a job's report: one HTML file that opens offline."""
    client = connect()
    job_id = resolve(client, job)
    result = client.result(job_id, "package")
    path = out or Path(f"{result['bundle_name']}-report.html".replace("/", "_"))
    path.write_bytes(client.artifact(job_id, result["report"]["digest"]))
    output.say(str(path))
    if open_it:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


@app.command()
def signin(page: Annotated[str, typer.Argument(help="Page to open.")] = "/") -> None:
    """Print a one-time address that signs a browser in to the dashboard."""
    output.say(connect().sign_in_link(page))


@app.command()
def parse(
    what: Annotated[str, typer.Argument(help="A config.json, a folder, an archive, or the name of an example.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens at which FLOPs and bytes are counted.")] = 8192,
    target: Annotated[str, typer.Option(help="Device whose roofline ranks the gaps.")] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Parse a model here, without a service: layers, blocks, parameters, gaps. Exit code 3: partial, with reasons."""
    from api.cli.local import run_parse
    from api.cli.tables import parse_view

    outcome = run_parse(what, sequence_length=sequence_length, target=target, quiet=as_json)
    if as_json:
        output.console().print_json(data=outcome)
    else:
        output.console().print(parse_view(outcome))
    if outcome["reasons"]:
        raise typer.Exit(output.PARTIAL)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="The known model: a path or the name of an example.")],
    after: Annotated[str, typer.Argument(help="The new model.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens at which FLOPs and bytes are counted.")] = 8192,
    everything: Annotated[bool, typer.Option("--all", help="Also what both have.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what is new in one model against another: sizes, features, operators."""
    from api.cli.local import run_diff
    from api.cli.tables import diff_view

    found = run_diff(before, after, sequence_length=sequence_length, target="h200", quiet=as_json)
    if as_json:
        output.console().print_json(data=found)
    else:
        output.console().print(diff_view(found, everything=everything))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    llm: Annotated[bool, typer.Option("--llm", help="Try the language model's endpoint instead.")] = False,
) -> None:
    """Say what this machine has, try what it claims, and say what that allows."""
    from api.cli.local import DOCTOR, LLM_DOCTOR, run_doctor
    from api.cli.tables import doctor_table

    checks = run_doctor(LLM_DOCTOR if llm else DOCTOR)
    if as_json:
        output.console().print_json(data=checks)
    else:
        output.console().print(doctor_table(checks))


@app.command()
def demo(
    to: Annotated[Path, typer.Option(help="Where the bundle goes.")] = Path("bundles"),
    profile: Profile = "standard",
) -> None:
    """The whole way on a real model: start the service, submit Kimi-Linear-48B, watch, take the bundle home."""
    from api.cli.service import run_demo

    run_demo(to, profile)


app.command()(finetune)
app.command()(judge)


@bundle.command("verify")
def bundle_verify(
    path: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    key: Annotated[str | None, typer.Option(help="Public key (hex) that must have signed it.")] = None,
) -> None:
    """Check every file of a bundle and its signature."""
    from api.cli.bundles import verify

    output.say(f"{path} is what was signed, by key {verify(path, key)}")


@bundle.command("pull")
def bundle_pull(
    job: JobId = "last",
    to: Annotated[Path, typer.Option(help="Folder to put the bundle in.")] = Path("bundles"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace another bundle of the same name.")] = False,
) -> None:
    """Fetch a job's bundle, unpack it safely, verify it."""
    from api.cli.bundles import pull

    client = connect()
    output.say(str(pull(client, resolve(client, job), to, replace=replace)))


def main() -> None:
    """Entry point: no error leaves as a traceback."""
    try:
        app()
    except Problem as problem:
        output.show_problem(problem)
        sys.exit(output.UNREACHABLE if problem.kind == "unreachable" else output.FAILED)
    except KeyboardInterrupt:
        sys.exit(output.INTERRUPTED)
    except Exception as error:
        output.show_crash(error)
        sys.exit(output.FAILED)
    finally:
        opened.close()


if __name__ == "__main__":
    main()
