"""Scale: the published model on many devices: budget, layout, dry run, real small runs, projection. Free of torch."""

from __future__ import annotations

import time

from onboarding.context import StageContext
from onboarding.custom_code.definition import definition_of
from onboarding.devices import find_device
from onboarding.stages.align.result import AlignResult
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale import limits
from onboarding.stages.scale.dry import dry_ranks
from onboarding.stages.scale.gloo import gloo_runs
from onboarding.stages.scale.plans import WORDS, Planner
from onboarding.stages.scale.projection import trial_factor
from onboarding.stages.scale.result import Hardware, Mode, ModePlan, ScaleResult
from onboarding.stages.throughput.result import ThroughputResult
from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.work import work_of

GIB = 1 << 30
MICROBATCH = 1
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
    tokens = context.options.sequence_length
    asked = hardware_of(context)
    hardware = limits.limited(asked, MICROBATCH, tokens)
    work = work_of(architecture)
    context.progress(0, 4, "memory and layouts")
    measured = context.load_result("throughput", "")
    trained = ThroughputResult.model_validate(measured) if measured and measured.get("runs") else None
    device = find_device(context.options.target)
    system = SYSTEMS[device.key.upper()]
    planner = Planner(
        architecture=architecture,
        work=work,
        device=device,
        system=system,
        hardware=hardware,
        asked=asked,
        tokens=tokens,
        microbatch=MICROBATCH,
        trial=trial_factor(architecture, work, system, trained),
    )
    modes = [planner.plan(mode) for mode in WORDS]
    dry_mode, dry_ep = _for_the_dry_run(modes)
    quick = context.profile.name == "quick"
    dry, dry_reason = (
        ([], QUICK)
        if quick
        else dry_ranks(context, definition, ranks=hardware.devices, ep=dry_ep, adapters=dry_mode == "adapters")
    )
    gloo, gloo_reason = ([], QUICK) if quick else gloo_runs(context, definition, align.twin_plan)
    return ScaleResult(
        summary=_summary(asked, hardware, modes),
        hardware=hardware,
        asked_devices=asked.devices,
        remarks=limits.remarks(asked, hardware, work, microbatch=MICROBATCH, tokens=tokens, ep=dry_ep),
        sequence_length=tokens,
        microbatch=MICROBATCH,
        batch=MICROBATCH * limits.accumulated(hardware.devices, MICROBATCH, tokens) * hardware.devices,
        modes=modes,
        dry_mode=dry_mode,
        dry_ep=dry_ep,
        dry=dry,
        dry_reason=dry_reason,
        gloo=gloo,
        gloo_reason=gloo_reason,
        not_measured=_not_measured(hardware, dry=not dry_reason, gloo=not gloo_reason),
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


def _for_the_dry_run(modes: list[ModePlan]) -> tuple[Mode, int]:
    """The first way of training whose plan fits, with its layout."""
    plan = next((mode for mode in modes if mode.budget.fits), modes[0])
    return plan.mode, next(row.ep for row in plan.layouts if row.chosen)


def _summary(asked: Hardware, hardware: Hardware, modes: list[ModePlan]) -> str:
    parts = []
    for plan in modes:
        chosen = next(row for row in plan.layouts if row.chosen)
        used = f"{plan.budget.device_total / GIB:.0f} of {plan.budget.device_available / GIB:.0f} GiB"
        word = "adapters" if plan.mode == "adapters" else "full training"
        step = f", {plan.projection.step_s:.3g} s a step" if plan.projection else ""
        parts.append(f"{word}: EP {chosen.ep} x {chosen.efsdp}, {used}{step if plan.budget.fits else ', does not fit'}")
    of = f" of {asked.devices:,} are of use" if asked.devices > hardware.devices else ""
    return f"{hardware.devices:,} devices{of} (projection); {'; '.join(parts)}"


def _not_measured(hardware: Hardware, *, dry: bool, gloo: bool) -> list[str]:
    """What no run stands behind; of the runs, only those that were made are named."""
    ran = ", and the dry run computes and sends nothing" if dry else ""
    found = [f"Nothing ran on {hardware.devices} devices: budget and step time are projections{ran}."]
    if gloo:
        found.append(
            "Processes of one machine over gloo show that every layout gives the same losses. Their times say nothing "
            "of GPUs and NCCL."
        )
    return found
