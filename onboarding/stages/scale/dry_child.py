"""The confined side of the dry run: one step of some ranks of a large job on fake tensors.

    python -m onboarding.stages.scale.dry_child JOB.json

Prints one JSON line for each rank as soon as it is done, so that a limit loses only what was not reached.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel

from runtime.dryrun import dry_run
from runtime.lora.config import LoraConfig
from runtime.parallel.config import ParallelConfig


class Job(BaseModel):
    """What the parent asks for."""

    definition: str
    """Folder with ``config.json``."""
    ranks: int
    which: list[int]
    ep: int
    tokens: int
    adapters: bool
    code: str | None = None


def main(arguments: list[str]) -> int:
    """Run the job file named on the command line."""
    job = Job.model_validate_json(Path(arguments[0]).read_text())
    if job.code is not None:
        from onboarding.custom_code.load import install

        install(Path(job.code))
    targets = ("linear", "gmm") if job.ep > 1 else ("linear",)
    for rank in job.which:
        found = dry_run(
            Path(job.definition),
            ranks=job.ranks,
            parallel=ParallelConfig(ep=job.ep),
            rank=rank,
            tokens=job.tokens,
            lora=LoraConfig(targets=targets) if job.adapters else None,
        )
        print(json.dumps({"found": asdict(found)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
