"""Ranking the gaps: every operator of a training step with its floor, its provider, and what a kernel could save."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kernel_templates.registry import load_spec
from onboarding.architecture import Architecture, GraphOperator, OperatorUse
from onboarding.devices import Device
from onboarding.stages.gaps.attention import FAST_ATTENTION, attention_words, serve_attention
from onboarding.stages.gaps.providers import (
    EAGER_BANDWIDTH,
    LAUNCH_US,
    LINEAR_EFFICIENCY,
    Provided,
    eager_ms,
    serve_use,
)
from onboarding.stages.gaps.result import Coverage, GapsResult, OperatorRow, Roofline

FAST = 0.8
"""A provider that reaches this share of the roofline is fast; an operator of a family below it is a gap."""
KERNEL_SHARE = 0.7
"""Share of the roofline that a generated kernel is expected to reach, for ranking only."""
_LINEAR = ("mm", "addmm", "bmm", "baddbmm", "matmul")
_PROJECTIONS = ("mm", "addmm", "convolution", "convolution_backward")
"""What a mixer does beside its recurrence."""


@dataclass(kw_only=True)
class _Group:
    """Plain torch operators that one provider serves in one role."""

    kind: str
    role: str
    operators: list[GraphOperator]


def analyse_gaps(architecture: Architecture, device: Device) -> GapsResult:
    """Every operator of one training step (forward and backward, batch 1), ranked by expected saving."""
    tokens = architecture.sequence_length
    rows = [_use_row(use, device, tokens) for use in architecture.uses]
    rows += [_group_row(group, device) for group in _groups(architecture.graph, _recurrent(architecture))]
    step = sum(row.provider_ms for row in rows)
    flops, moved = sum(row.flops for row in rows), sum(row.bytes_moved for row in rows)
    rows = [
        row.model_copy(
            update={
                "gain": row.saving_ms / step if step else 0.0,
                "intensity": row.flops / row.bytes_moved if row.bytes_moved else 0.0,
                "bound": device.bound(row.flops, row.bytes_moved),
                "share_flops": row.flops / flops if flops else 0.0,
                "share_bytes": row.bytes_moved / moved if moved else 0.0,
                "share_time": row.provider_ms / step if step else 0.0,
            }
        )
        for row in rows
    ]
    rows.sort(key=lambda row: (-row.saving_ms, -row.provider_ms, row.name))
    gaps = [row for row in rows if row.gap]
    share = sum(row.share_time for row in gaps)
    return GapsResult(
        summary=(
            f"{len(gaps)} operators without a fast provider{_without_family(gaps)}: {share:.0%} of the step at "
            f"T {tokens} on {device.name} (projection)"
        ),
        target=device.key,
        sequence_length=tokens,
        rows=rows,
        gaps=[row.digest for row in gaps if row.digest],  # what no family covers has no spec to generate from
        step_ms=step,
        coverage=coverage(rows),
        roofline=Roofline(tflops=device.tflops, bandwidth=device.bandwidth, basis=device.basis),
        basis=(
            f"projection, not a measurement: roofline of {device.name} ({device.tflops:g} TFLOP/s, "
            f"{device.bandwidth:g} TB/s; {device.basis}), batch 1, forward and backward, no optimizer"
        ),
    )


def _without_family(gaps: list[OperatorRow]) -> str:
    alone = sum(not row.digest for row in gaps)
    return f" ({alone} of no template family)" if alone else ""


def _fast_from(row: OperatorRow) -> float:
    """Share of the roofline from which on a provider is fast."""
    return FAST_ATTENTION if row.family == "attention" else FAST


def coverage(rows: list[OperatorRow]) -> list[Coverage]:
    """What each provider serves, largest share of the step first."""
    by_provider: dict[str, list[OperatorRow]] = defaultdict(list)
    for row in rows:
        by_provider[row.provider].append(row)
    found = [
        Coverage(
            provider=provider,
            operators=len(served),
            share_time=sum(row.share_time for row in served),
            share_flops=sum(row.share_flops for row in served),
            fast=sum(row.floor_ms for row in served) >= sum(_fast_from(row) * row.provider_ms for row in served),
        )
        for provider, served in by_provider.items()
    ]
    return sorted(found, key=lambda row: (-row.share_time, row.provider))


def _use_row(use: OperatorUse, device: Device, tokens: int) -> OperatorRow:
    spec = load_spec(use.spec)
    each = use.flops / spec.flops(1) / use.calls
    rows = max(1, round(each))
    flops = use.flops + use.calls * spec.flops(rows, backward=True)
    moved = use.bytes_moved + use.calls * spec.bytes_moved(rows, backward=True)
    # forward and backward have floors of their own: the sum of the two, not the floor of the sum
    floor = device.floor_ms(use.flops, use.bytes_moved) + device.floor_ms(flops - use.flops, moved - use.bytes_moved)
    provided = serve_use(use, spec, device, tokens, floor)
    return OperatorRow(
        digest=use.digest,
        name=use.words,
        role=use.role,
        family=spec.family,
        calls=use.calls,
        flops=flops,
        bytes_moved=moved,
        floor_ms=floor,
        provider=provided.provider,
        provider_ms=provided.ms,
        basis=provided.basis,
        share_flops=0.0,
        share_bytes=0.0,
        share_time=0.0,
        saving_ms=max(0.0, provided.ms - floor / KERNEL_SHARE),
        gap=floor < FAST * provided.ms,
        spec=use.spec,
    )


def _recurrent(architecture: Architecture) -> dict[str, str]:
    """Letters of blocks whose mixer's own code is a recurrence that no operator spec stands for, with its words."""
    served = {family for use in architecture.uses if (family := use.spec["family"]) in ("linear_attention",)}
    found: dict[str, str] = {}
    for block in architecture.blocks:
        for mixer in block.roles.mixers if block.roles else ():
            own = mixer.kind == "recurrence" or (mixer.kind == "linear" and not served)
            if own:
                found.setdefault(block.letter, f"recurrence: {block.mixer}")
    return found


def _groups(graph: list[GraphOperator], recurrent: dict[str, str]) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    for operator in graph:
        if operator.use:
            continue
        kind = _kind(operator)
        role = operator.name if kind == "scan" else operator.role
        if kind == "attention":
            role = attention_words(operator)
        if operator.block in recurrent and operator.role == "mixer" and operator.name not in _PROJECTIONS:
            kind, role = "scan", recurrent[operator.block]
        groups.setdefault((kind, role), _Group(kind=kind, role=role, operators=[])).operators.append(operator)
    return list(groups.values())


def _kind(operator: GraphOperator) -> str:
    if operator.name.startswith("attention"):
        return "attention"
    if operator.name in _LINEAR:
        return "linear"
    if "conv" in operator.name:
        return "convolution"
    if operator.name == "experts":
        return "experts"
    if operator.name in ("embedding", "embedding_dense_backward"):
        return "embedding"
    if operator.matmul:
        return "scan"
    if operator.role in ("other", "head"):
        return "loss"
    return "elementwise"


def _group_row(group: _Group, device: Device) -> OperatorRow:
    flops = sum(op.flops for op in group.operators)
    moved = sum(op.bytes_moved for op in group.operators)
    floor = sum(device.floor_ms(op.flops, op.bytes_moved) for op in group.operators)
    forward = sum(op.count for op in group.operators if op.phase == "forward")
    provided = _provided(group, device, floor, flops, moved)
    ms = max(floor, provided.ms)
    # no template family covers these: gaps without a spec
    if group.kind == "attention":
        gap = floor < FAST_ATTENTION * ms
    else:  # a state along the sequence, whatever its loop costs
        gap = group.kind == "scan" and any(word in group.role for word in ("recurrence", "scan", "mamba"))
    return OperatorRow(
        digest="",
        name=_name(group),
        role=group.operators[0].role if group.kind in ("attention", "scan") else group.role,
        family=group.kind,
        calls=forward,
        flops=flops,
        bytes_moved=moved,
        floor_ms=floor,
        provider=provided.provider,
        provider_ms=ms,
        basis=provided.basis,
        share_flops=0.0,
        share_bytes=0.0,
        share_time=0.0,
        saving_ms=max(0.0, ms - floor / KERNEL_SHARE) if gap else 0.0,
        gap=gap,
    )


def _name(group: _Group) -> str:
    shapes: dict[str, int] = defaultdict(int)
    for operator in group.operators:
        shapes[operator.name] += operator.count
    if group.kind in ("attention", "scan"):
        return group.role
    if group.kind == "linear":
        return f"matrix products of the {group.role}"
    if group.kind == "elementwise":
        return f"elementwise operators of the {group.role} ({sum(shapes.values()):,})"
    return {"loss": "loss", "embedding": "token embedding"}.get(group.kind, f"{group.kind} of the {group.role}")


def _provided(group: _Group, device: Device, floor: float, flops: float, moved: float) -> Provided:
    count = sum(op.count for op in group.operators)
    if group.kind == "linear":
        return Provided(
            provider="torch linear",
            ms=floor / LINEAR_EFFICIENCY,
            basis=f"assumed {LINEAR_EFFICIENCY:.0%} of the roofline (cuBLAS)",
        )
    if group.kind == "attention":
        return serve_attention(group.operators, device, floor)
    basis = (
        f"{count:,} torch operators, {moved / 1e9:,.1f} GB, counted in the trace; at {EAGER_BANDWIDTH:.0%} of the "
        f"bandwidth and at least {LAUNCH_US:g} us a launch (assumed)"
    )
    names = {"scan": "transformers torch fallback", "convolution": "torch conv1d", "embedding": "torch embedding"}
    return Provided(
        provider=names.get(group.kind, "torch eager"), ms=eager_ms(device, count, flops, moved), basis=basis
    )
