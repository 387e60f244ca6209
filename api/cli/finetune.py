"""``onboard finetune``: what is asked for becomes the options of a worker process; see ``finetune_view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli import output
from onboarding.problem import Problem

FOLDER = Path("finetuned")
TARGET = "Role (attention, qkv, mlp, linear, gmm) or module that is adapted; repeatable."
SETTING = "Any field of the run's config, for example memory.recompute=swap_cache; repeatable."


def finetune(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    data: Annotated[list[str], typer.Option("--data", help="JSONL, Parquet or text: path, glob, address; repeatable.")],
    weights: Annotated[Path | None, typer.Option(help="Folder of safetensors, config and tokenizer.")] = None,
    twin: Annotated[bool, typer.Option("--twin", help="Train the model's reduced twin: a rehearsal.")] = False,
    to: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run; what it left goes on.")] = FOLDER,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps [200; twin 30].")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens of a row [2048; twin 64].")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step over all ranks [8; twin 4].")] = None,
    microbatch: Annotated[int, typer.Option(min=1, help="Rows that one rank runs at a time.")] = 1,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate [2e-4; full 1e-5; twin 3e-3].")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    target: Annotated[list[str] | None, typer.Option(help=TARGET)] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all parameters instead of adapters.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, one a GPU.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share one copy of the experts.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    kernels: Annotated[bool, typer.Option("--kernels/--no-kernels", help="Use the bundle's kernels.")] = True,
    key: Annotated[str | None, typer.Option(help="Public key (hex) that must have signed the bundle.")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help=SETTING)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan.")] = False,
) -> None:
    """Fine-tune a model with its bundle; ends with an adapter that peft loads."""
    from api.cli.bundles import verify
    from api.cli.finetune_view import Run, conclude

    if twin and weights is not None:
        raise Problem("twin-or-weights", "--twin and --weights exclude each other", "a twin has weights of its own")
    if not twin and weights is None:
        fix = "name the folder of the model's safetensors with --weights, or rehearse on the reduced twin with --twin"
        raise Problem("weights-missing", "a bundle holds kernels, not weights", fix)
    if lr is not None and not 0 < lr < float("inf"):
        raise Problem(
            "bad-rate", f"--lr {lr} is no learning rate", "a finite number above zero is wanted, for example 2e-4"
        )
    options = {
        "bundle": str(bundle),
        "key": verify(bundle, key),
        "data": data,
        "output": str(to),
        "weights": str(weights) if weights is not None else None,
        "twin": twin,
        "kernels": kernels,
        "full": full,
        "rank": rank,
        "targets": target or [],
        "steps": steps,
        "sequence_length": sequence_length,
        "batch": batch,
        "microbatch": microbatch,
        "lr": lr,
        "ranks": ranks,
        "ep": ep,
        "device": device,
        "dry_run": dry_run,
        "settings": nested(setting or []),
    }
    run = Run(to)
    status = run.follow(options)
    if run.problem is not None:
        raise Problem(**run.problem)
    if run.stopped:
        output.tell(f"the run is saved; the same command goes on from step {run.stopped['step']}")
        raise typer.Exit(output.FAILED if run.stopped["why"].startswith("an alert") else output.INTERRUPTED)
    if status != 0:
        raise run.crashed(status)
    if dry_run:
        output.say("nothing was trained: this was a dry run")
        return
    conclude(run)


def nested(settings: list[str]) -> dict[str, Any]:
    """``a.b=value`` as nested mappings; values are YAML.

    Raises:
        Problem: ``bad-setting``.
    """
    import yaml

    result: dict[str, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not all(part.isidentifier() for part in path.split(".")):
            raise Problem("bad-setting", f"--set {setting} is not FIELD=VALUE", "for example --set step.max_norm=0.5")
        place = result
        *parents, last = path.split(".")
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = yaml.safe_load(value)
    return result
