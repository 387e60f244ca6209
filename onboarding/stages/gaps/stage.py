"""The gaps stage: which operators have no fast provider, ranked by what a kernel would save."""

from __future__ import annotations

from onboarding.context import StageContext
from onboarding.devices import find_device
from onboarding.stages.gaps.analyse import analyse_gaps
from onboarding.stages.gaps.result import GapsResult
from onboarding.stages.parse.result import ParseResult


def run(context: StageContext) -> GapsResult:
    """Rank the parsed architecture's operators for the job's target device.

    Raises:
        Problem: ``unknown-target``.
    """
    device = find_device(context.options.target)
    architecture = context.result("parse", ParseResult).architecture
    result = analyse_gaps(architecture, device)
    context.progress(1, 1, result.summary)
    return result
