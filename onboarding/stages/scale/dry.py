"""The dry run of single ranks in a confined child, within a time limit. Free of torch on this side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onboarding.context import StageContext
from onboarding.custom_code.definition import CONFIG, CONFINED, Definition
from onboarding.sandbox import Limits, run_module
from onboarding.stages.scale.result import CollectiveRow, DryRank

LIMITS = Limits(wall_s=420.0, memory_bytes=6 * 2**30)
TOKENS = 128
"""Of the rank's micro-batch: bytes of all-to-alls grow in proportion, those of weights not at all."""


def dry_ranks(
    context: StageContext, definition: Definition, *, ranks: int, ep: int, adapters: bool
) -> tuple[list[DryRank], str]:
    """Step rank 0 and the last rank.

    Returns:
        What was seen, and why a rank is missing (empty if none is).
    """
    folder = context.scratch / "dry"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(definition.config))
    which = sorted({0, ranks - 1})
    job = {
        "definition": ".",
        "ranks": ranks,
        "which": which,
        "ep": ep,
        "tokens": TOKENS,
        "adapters": adapters,
        "code": str(definition.code.resolve()) if definition.code else None,
    }
    (folder / "job.json").write_text(json.dumps(job))
    seen: list[DryRank] = []

    def keep(line: str) -> None:
        row = _read(line)
        if row is not None and len(seen) < len(which):
            seen.append(row)
            context.progress(len(seen), len(which), f"dry run of rank {row.rank}")

    outcome = run_module(
        "onboarding.stages.scale.dry_child",
        ["job.json"],
        scratch=folder,
        read_only=[Path(job["code"])] if job["code"] else [],  # type: ignore[arg-type]  # a string where there is code
        limits=LIMITS,
        env={"OMP_NUM_THREADS": "1", **(CONFINED if definition.code else {})},
        on_line=keep,
        unsafe=context.settings.unsafe_no_sandbox,
    )
    if outcome.ok and len(seen) == len(which):
        return seen, ""
    last = " ".join(outcome.stderr_tail.strip().splitlines()[-1:])
    why = f"it ran longer than {LIMITS.wall_s:g} s" if outcome.reason == "time" else f"{outcome.reason} {last}"
    return seen, f"the dry run of {len(which) - len(seen)} of {len(which)} ranks is missing: {why}"[:600]


def _read(line: str) -> DryRank | None:
    """A rank's line; what else the child prints is not ours to read."""
    try:
        data: dict[str, Any] = json.loads(line)["found"]
        rows = [CollectiveRow(**row) for row in data["collectives"]]
        names = ("rank", "weight_bytes", "gradient_bytes", "optimizer_bytes", "tokens", "seconds", "host_bytes")
        return DryRank(**{name: data[name] for name in names}, collectives=rows)
    except (ValueError, TypeError, KeyError):
        return None
