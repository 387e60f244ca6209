"""The worker behind ``onboard finetune``: from a bundle and data to a run's config, then the run itself.

    python -P -m onboarding.finetune OPTIONS.json

Says everything as JSON lines, like ``runtime.train --events``. Weights are given, or the model's reduced twin is made:
its config is derived from the bundle's, its initial values are drawn by a fixed seed and written beside the result, so
that the adapter can be used with them.
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from onboarding.problem import Problem
from runtime.refusal import Refused
from runtime.voice import Voice

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tiktoken.model")
TWIN_LAYERS = 4
REQUEST = "request.json"
BEGUN = ("checkpoints", "adapter", "model")
"""What a run leaves in its folder once it has begun."""


class Options(BaseModel):
    """What the command line was asked for."""

    bundle: str
    key: str
    """Public key that signed the bundle, which the command line has verified."""
    data: list[str]
    output: str
    weights: str | None = None
    twin: bool = False
    kernels: bool = True
    full: bool = False
    rank: int = 16
    targets: list[str] = []
    steps: int | None = None
    sequence_length: int | None = None
    batch: int | None = None
    microbatch: int = 1
    lr: float | None = None
    ranks: int = 1
    ep: int = 1
    device: str = "auto"
    dry_run: bool = False
    settings: dict[str, Any] = {}
    """Fields of the run's config that replace what is derived here, nested."""


def main(arguments: list[str]) -> int:
    """Prepare, then become the run."""
    options = Options.model_validate_json(Path(arguments[0]).read_text())
    voice = Voice(first=True, events=True)
    try:
        path = prepare(options, voice)
    except Problem as problem:
        voice.say("problem", problem=problem.kind, title=problem.title, detail=problem.detail, extra=problem.extra)
        return 1
    except Refused as refused:
        voice.say("problem", **refused.to_dict())
        return 1
    run = [str(path), "--events", *(["--dry-run"] if options.dry_run else [])]
    if options.ranks > 1 and not options.dry_run:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        os.execv(sys.executable, [sys.executable, *torchrun, "--max-restarts", "3", "-m", "runtime.train", *run])
    if options.ranks > 1:
        os.environ["WORLD_SIZE"] = str(options.ranks)
    from runtime.train import main as train

    return train(run)


def prepare(options: Options, voice: Voice) -> Path:
    """Write the run's config; gives its path.

    Raises:
        Problem: no weights and no twin, or weights of another model.
        Refused: a definition that cannot be used.
    """
    output = Path(options.output).resolve()
    bundle = Path(options.bundle).resolve()
    model_type = str(json.loads((bundle / "bundle.json").read_text())["model_type"])
    refuse_own_code(bundle)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem("output-unusable", f"cannot write to {output}", error.strerror or str(error)) from None
    asked = same_request(options, bundle, output)
    if options.twin:
        voice.say("preparing", words="deriving the reduced twin and drawing its initial values")
        base = twin(bundle, output, options, known=asked == asked_before(output))
    elif options.weights is not None:
        base = Path(options.weights).resolve()
        check_weights(base, model_type)
    else:
        fix = "name the folder of the model's safetensors with --weights, or try the reduced twin with --twin"
        raise Problem("weights-missing", "a bundle holds kernels, not weights", fix)
    config = merged(run_config(options, base, output), options.settings)
    path = output / "finetune.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    (output / REQUEST).write_text(json.dumps(asked))
    return path


def refuse_own_code(bundle: Path) -> None:
    """A run holds the model in its own process, and submitted code is executed in the sandbox only.

    Raises:
        Problem: ``model-brings-code``, with the way to train such a model.
    """
    try:
        intake = json.loads((bundle / "report.json").read_text())["intake"]
    except (OSError, ValueError, KeyError):
        return  # what the bundle lacks is said where it is needed
    if intake.get("runs_code"):
        raise Problem(
            "model-brings-code",
            f"{intake.get('name') or 'this model'} is defined by its own code, which is executed in the sandbox only",
            "the runtime trains models whose classes transformers has. Train this one in a script of yours: build it "
            f"with trust_remote_code=True, put {bundle} on sys.path, and call 'from apply import apply; apply(model)'",
        )


def same_request(options: Options, bundle: Path, output: Path) -> dict[str, Any]:
    """What a folder's run is of; one that has begun goes on only with the same model, bundle, data and adapters.

    Raises:
        Problem: ``output-of-another-run``.
    """
    asked = {
        "bundle": sha256((bundle / "bundle.json").read_bytes()).hexdigest(),
        "data": sorted(name if "://" in name else str(Path(name).resolve()) for name in options.data),
        "weights": str(Path(options.weights).resolve()) if options.weights else "the reduced twin",
        "trained": "all parameters" if options.full else f"adapters of rank {options.rank} on {options.targets}",
        "sequence length": options.sequence_length,
    }
    before = asked_before(output)
    if before and any((output / name).exists() for name in BEGUN):
        other = [name for name, value in asked.items() if before.get(name) != value]
        if other:
            raise Problem(
                "output-of-another-run",
                f"{output} holds a run with another {' and another '.join(other)}",
                "name another folder with --output, or remove this one",
            )
    return asked


def asked_before(output: Path) -> dict[str, Any]:
    """The request that the folder was last prepared for; empty if there was none."""
    note = output / REQUEST
    found: dict[str, Any] = json.loads(note.read_text()) if note.is_file() else {}
    return found


def twin(bundle: Path, output: Path, options: Options, *, known: bool) -> Path:
    """Derive the reduced twin of the bundle's model and write config and initial values; gives their folder.

    ``known``: what the folder holds was derived for the same request.
    """
    from onboarding.twin import build, derive

    folder = output / "base"
    if known and (folder / "config.json").is_file():
        return folder
    published = json.loads((bundle / "report.json").read_text())["intake"]["config"]
    plan = derive(published, layers_at_least=TWIN_LAYERS, sequence_length=options.sequence_length or 64)
    model: Any = build(plan, seed=0)
    model.save_pretrained(folder)
    return folder


def check_weights(folder: Path, model_type: str) -> None:
    """Refuse weights of another model by their config.

    Raises:
        Problem: ``weights-missing``, ``weights-of-another-model``.
    """
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        detail = "--weights is a folder with config.json, safetensors and the tokenizer, as published"
        raise Problem("weights-missing", f"{folder} has no readable config.json", detail) from None
    types = {found.get("model_type"), (found.get("text_config") or {}).get("model_type")}
    if model_type not in types:
        title = f"the weights are of a {found.get('model_type')!r} model, the bundle is for {model_type!r}"
        raise Problem("weights-of-another-model", title, f"{folder / 'config.json'} says so; use that model's bundle")


def run_config(options: Options, base: Path, output: Path) -> dict[str, Any]:
    """The run as plain data: what was asked for, and defaults that suit it."""
    small = options.twin
    steps = options.steps or (30 if small else 200)
    has_tokenizer = any((base / name).is_file() for name in TOKENIZERS)
    rate = options.lr or (1e-5 if options.full and not small else 3e-3 if small else 2e-4)
    adapters = {"r": options.rank, "alpha": 2.0 * options.rank, "targets": targets(options, base)}
    return {
        "output": str(output),
        "steps": steps,
        "device": options.device,
        "model": {
            "definition": str(base),
            "weights": str(base),
            "bundle": str(Path(options.bundle).resolve()) if options.kernels else None,
            "trusted_key": options.key,
            "dtype": dtype(options),
        },
        "data": {
            "files": [name if "://" in name else str(Path(name).resolve()) for name in options.data],
            "tokenizer": "model" if has_tokenizer or not small else "bytes",
            "sequence_length": options.sequence_length or (64 if small else 2048),
        },
        "parallel": {"ep": options.ep},
        "optimizer": {"lr": rate, "warmup_steps": min(steps // 10, 20)},
        "step": {"batch": options.batch or (4 if small else 8), "microbatch": options.microbatch},
        "checkpoint": {"every": max(steps // 4, 1) if small else 50},
        "lora": None if options.full else adapters,
    }


def targets(options: Options, base: Path) -> list[str]:
    """What gets adapters where nothing was said: every linear layer of the blocks, and routed experts."""
    if options.targets:
        return options.targets
    from runtime.model import read_definition
    from runtime.telemetry.flops import expert_share

    experts = expert_share(read_definition(base).get_text_config()) < 1
    return ["linear", "gmm"] if experts else ["linear"]


def dtype(options: Options) -> str:
    """bfloat16, but float32 for a twin on a CPU, as its kernels were aligned."""
    import torch

    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    return "float32" if options.twin and on_cpu else "bfloat16"


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``config`` with nested ``changes`` put over it."""
    result = dict(config)
    for name, value in changes.items():
        inner = result.get(name)
        result[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
