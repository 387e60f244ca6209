"""Scale: the published model on many devices: budget, layout, dry run, real small runs, projection. Free of torch."""

from __future__ import annotations

import time

from onboarding.architecture import Architecture
from onboarding.context import StageContext
from onboarding.custom_code.definition import definition_of
from onboarding.devices import find_device
from onboarding.stages.align.result import AlignResult
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale import layout, memory
from onboarding.stages.scale.dry import dry_ranks
from onboarding.stages.scale.gloo import gloo_runs
from onboarding.stages.scale.result import Hardware, Layout, Mode, ModePlan, ScaleResult
from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.work import Work, work_of

GIB = 1 << 30
MICROBATCH = 1
ACCUMULATED = 4
"""Micro-batches of one step on each device."""
WORDS: dict[Mode, str] = {
    "adapters": f"rank-{memory.RANK} adapters on attention and routed experts, frozen bfloat16 base",
    "full": "all parameters, AdamW, float32 weights gathered in bfloat16",
}
QUICK = "left out by the quick profile; the standard one does it"


def run(context: StageContext) -> ScaleResult:
    """Plan the published model on the job's nodes, and run what this machine can run of it.

    Raises:
        LookupError: an upstream stage has not finished.
    """
    started = time.monotonic()
    architecture = context.result("parse", ParseResult).architecture
    align = context.result("align", AlignResult)
    definition = definition_of(context)
    hardware = hardware_of(context)
    work = work_of(architecture)
    context.progress(0, 4, "memory and layouts")
    modes = [plan_mode(context, architecture, work, hardware, mode) for mode in WORDS]
    dry_mode, dry_ep = _for_the_dry_run(modes)
    quick = context.profile.name == "quick"
    dry, dry_reason = (
        ([], QUICK)
        if quick
        else dry_ranks(context, definition, ranks=hardware.devices, ep=dry_ep, adapters=dry_mode == "adapters")
    )
    gloo, gloo_reason = ([], QUICK) if quick else gloo_runs(context, definition, align.twin_plan)
    return ScaleResult(
        summary=_summary(hardware, modes),
        hardware=hardware,
        sequence_length=context.options.sequence_length,
        microbatch=MICROBATCH,
        batch=MICROBATCH * ACCUMULATED * hardware.devices,
        modes=modes,
        dry_mode=dry_mode,
        dry_ep=dry_ep,
        dry=dry,
        dry_reason=dry_reason,
        gloo=gloo,
        gloo_reason=gloo_reason,
        not_measured=_not_measured(hardware),
        seconds=round(time.monotonic() - started, 1),
    )


def hardware_of(context: StageContext) -> Hardware:
    """The nodes that the job plans for."""
    device = find_device(context.options.target)
    system = SYSTEMS[device.key.upper()]
    return Hardware(
        name=device.name,
        nodes=context.options.nodes,
        per_node=context.options.devices_per_node,
        memory_bytes=device.memory_gib * GIB,
        link=system.link,
        nic=system.nic,
    )


def plan_mode(
    context: StageContext, architecture: Architecture, work: Work, hardware: Hardware, mode: Mode
) -> ModePlan:
    """Budget, layouts and groups of one way of training."""
    tokens = context.options.sequence_length
    rows, budgets = [], {}
    for ep in layout.possible(hardware, work):
        found = memory.budget(architecture, work, hardware, mode, ep=ep, microbatch=MICROBATCH, tokens=tokens)
        budgets[ep] = found
        rows.append(
            Layout(
                ep=ep,
                efsdp=hardware.devices // ep,
                experts_per_rank=work.experts // ep if work.experts else 0,
                hierarchical=layout.hierarchical(hardware, ep),
                device_bytes=found.device_total,
                fits=found.fits,
            )
        )
    chosen = next((row for row in rows if row.fits), min(rows, key=lambda row: row.device_bytes))
    chosen.chosen = True
    return ModePlan(
        mode=mode,
        words=WORDS[mode],
        budget=budgets[chosen.ep],
        layouts=rows,
        groups=layout.groups(hardware, chosen.ep),
        expert_split=layout.expert_split(chosen.ep, work),
        projection=None,
        reason="",
    )


def _for_the_dry_run(modes: list[ModePlan]) -> tuple[Mode, int]:
    """The first way of training whose plan fits, with its layout."""
    plan = next((mode for mode in modes if mode.budget.fits), modes[0])
    return plan.mode, next(row.ep for row in plan.layouts if row.chosen)


def _summary(hardware: Hardware, modes: list[ModePlan]) -> str:
    parts = []
    for plan in modes:
        chosen = next(row for row in plan.layouts if row.chosen)
        used = f"{plan.budget.device_total / GIB:.0f} of {hardware.memory_bytes / GIB:.0f} GiB"
        word = "adapters" if plan.mode == "adapters" else "full training"
        parts.append(f"{word}: EP {chosen.ep} x {chosen.efsdp}, {used}{'' if plan.budget.fits else ', does not fit'}")
    return f"{hardware.devices} devices; {'; '.join(parts)}"


def _not_measured(hardware: Hardware) -> list[str]:
    return [
        f"Nothing ran on {hardware.devices} devices: budget and step time are projections, and the dry run computes "
        "and sends nothing.",
        "Processes of one machine over gloo show that every layout gives the same losses. Their times say nothing of "
        "GPUs and NCCL.",
    ]
