"""Operators of novel modules among the gaps of a job. Free of torch.

Their torch operators are counted in the rows of the module's role already, so the step's time stays what it was: a
novel row is a part of such a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from kernel_templates.registry import load_spec
from onboarding.architecture import OperatorUse
from onboarding.devices import Device
from onboarding.novel.facts import Named
from onboarding.stages.gaps.providers import EAGER_BANDWIDTH, LAUNCH_US, eager_ms
from onboarding.stages.gaps.result import GapsResult, OperatorRow

KERNEL_SHARE = 0.7
"""Share of the byte floor that a kernel is expected to reach, for ranking only."""


def with_novel(gaps: GapsResult, uses: Sequence[OperatorUse], named: Sequence[Named], device: Device) -> GapsResult:
    """The gap analysis with the operators that were proven in novel modules."""
    rows = sorted([*gaps.rows, *(_row(use, device, gaps.step_ms) for use in uses)], key=lambda row: -row.saving_ms)
    found = [row.digest for row in rows if row.gap and row.digest]
    own = [one for one in named if one.outcome == "own code"]
    notes = [f"{len(uses)} in novel modules"] if uses else []
    notes += [f"{', '.join(one.module for one in own)}: novel, served by its own torch code"] if own else []
    return gaps.model_copy(
        update={
            "rows": rows,
            "gaps": list(dict.fromkeys(found)),
            "novel": list(named),
            "uses": list(uses),
            "summary": "; ".join([gaps.summary, *notes]),
        }
    )


def _row(use: OperatorUse, device: Device, step_ms: float) -> OperatorRow:
    spec = load_spec(use.spec)
    moved = use.bytes_moved + use.calls * spec.bytes_moved(1, backward=True)
    floor = device.floor_ms(0.0, moved)
    provided = max(floor, eager_ms(device, use.eager_operators, 0.0, use.eager_bytes))
    saving = max(0.0, provided - floor / KERNEL_SHARE)
    return OperatorRow(
        digest=use.digest,
        name=use.words,
        role=use.role,
        family=spec.family,
        calls=use.calls,
        flops=0.0,
        bytes_moved=moved,
        floor_ms=floor,
        provider="its own torch code",
        provider_ms=provided,
        basis=(
            f"{use.eager_operators:,} torch operators, {use.eager_bytes / 1e9:,.1f} GB: its forward counted at several "
            f"lengths, its backward taken as twice that; at {EAGER_BANDWIDTH:.0%} of the bandwidth and at least "
            f"{LAUNCH_US:g} us a launch (assumed). FLOPs are not known. A part of another row of this table"
        ),
        share_flops=0.0,
        share_bytes=0.0,
        share_time=min(1.0, provided / step_ms) if step_ms else 0.0,
        saving_ms=saving,
        gain=min(1.0, saving / step_ms) if step_ms else 0.0,
        bound="memory",
        gap=True,
        spec=use.spec,
    )
