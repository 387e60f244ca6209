"""The parse stage: trace the model at its published size."""

from __future__ import annotations

import time

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.parse.result import ParseResult


def run(context: StageContext) -> ParseResult:
    """Parse the definition that intake checked.

    Raises:
        Problem: it cannot be built or traced; see :func:`onboarding.stages.parse.analyse.analyse`.
    """
    intake = context.result("intake", IntakeResult)
    context.progress(0, 2, "import transformers")
    from onboarding.stages.parse.analyse import analyse

    started = time.monotonic()
    context.progress(1, 2, "trace at the published size")
    parsed = analyse(intake.config, tokens=context.options.sequence_length, name=intake.name)
    context.progress(2, 2)
    architecture = parsed.architecture
    return ParseResult(
        summary=summary(architecture), architecture=architecture, seconds=round(time.monotonic() - started, 2)
    )


def summary(architecture: Architecture) -> str:
    """One line: layers by mixer, experts, parameters."""
    counts: dict[str, int] = {}
    for block in architecture.blocks:
        counts[block.mixer] = counts.get(block.mixer, 0) + len(block.layers)
    mixers = " + ".join(f"{count} {mixer}" for mixer, count in counts.items())
    experts = next((b.feed_forward for b in architecture.blocks if b.feed_forward.startswith("MoE")), "")
    census = architecture.census
    size = f"{census.total / 1e9:.1f} B total, {census.active / 1e9:.1f} B active"
    return ", ".join(filter(None, [f"{architecture.num_layers} layers: {mixers}", experts])) + f" · {size}"
