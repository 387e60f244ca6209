"""The report: one HTML file that opens offline and prints. Free of torch."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from onboarding.pictures.charts import layer_errors, loss_curves, time_shares
from onboarding.pictures.speed import measured_roofline, scaling_curve, step_breakdown, step_parts
from onboarding.pictures.strip import colours, layer_strip
from onboarding.stages.judge.result import JudgeResult
from onboarding.stages.package.facts import Facts


def render_report(facts: Facts, *, bundle_name: str) -> str:
    """The report as one self-contained HTML page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html", "j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(si=si, percent=percent, ms=milliseconds, gib=gib, weakest=weakest_fault)
    environment.globals.update(
        scaling_curve=lambda projection: Markup(scaling_curve(projection)),
        step_parts=lambda projection: Markup(step_parts(projection)),
    )
    architecture, measured = facts.parse.architecture, facts.throughput
    return environment.get_template("report.html.j2").render(
        facts=facts,
        a=architecture,
        bundle_name=bundle_name,
        verdict=verdict_paragraph(facts),
        colours=colours(architecture),
        # Our own pictures: every label in them is escaped where it is drawn.
        strip=Markup(layer_strip(architecture)),
        shares=Markup(time_shares(facts.gaps.rows)),
        errors=Markup(layer_errors(facts.align.layers)),
        curves=Markup(loss_curves(facts.align.curves)),
        breakdown=Markup(step_breakdown(measured)) if measured else "",
        reached=Markup(measured_roofline(measured)) if measured and measured.points else "",
        worst_layers=sorted(facts.align.layers, key=lambda e: -e.share)[:12],
    )


def verdict_paragraph(facts: Facts) -> str:
    """The answer first: what can be trusted, in one paragraph."""
    a, align = facts.parse.architecture, facts.align
    shipped = len(facts.shipped)
    levels = {k.verdict.level for k in facts.shipped if k.verdict is not None}
    level = " and ".join(sorted(levels)) or "none"
    worst = max((k.verdict.worst_share for k in facts.shipped if k.verdict is not None), default=0.0)
    curve = "inside its band" if align.inside_band else "outside its band"
    digests = {kernel.digest for kernel in facts.shipped}
    served = sum(row.share_time for row in facts.gaps.rows if row.gap and row.digest in digests)
    return (
        f"{a.name} ({si(a.census.total)} parameters, {si(a.census.active)} active) has "
        f"{sum(row.gap for row in facts.gaps.rows)} operators without a fast provider, {percent(_gap_share(facts))} of "
        f"the projected step. {shipped} of them, {percent(served)} of the step, ship with a kernel that the judge "
        f"accepted (level: {level}; worst error {worst:.2f} of its tolerance). On "
        f"the reduced twin every layer stays within {align.worst_share:.2f} of its tolerance, and the loss curve over "
        f"{len(align.curves.steps)} steps is {curve} (p = {align.p_value:.2f})."
    )


def weakest_fault(verdict: JudgeResult) -> float:
    """How clearly the judge would have seen a planted fault in the tensor where faults are hardest to see.

    For each output and gradient the case that tells a fault most clearly counts (a result that is all zeros tells
    nothing and is proven by the others); of these the smallest, in multiples of the tolerance.
    """
    clearest: dict[str, float] = {}
    for case in verdict.cases:
        for tensor, share in case.sensitivity.items():
            clearest[tensor] = max(clearest.get(tensor, 0.0), share)
    return min(clearest.values(), default=0.0)


def _gap_share(facts: Facts) -> float:
    return sum(row.share_time for row in facts.gaps.rows if row.gap)


def si(value: float) -> str:
    """A count with its unit: 49.1 B, 3.0 M."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f}"


def gib(value: float) -> str:
    """Bytes in binary units: 3.2 GiB, 480 MiB."""
    return f"{value / 2**30:.3g} GiB" if value >= 2**29 else f"{value / 2**20:.3g} MiB"


def percent(value: float) -> str:
    """A share as a percentage."""
    return f"{100 * value:.1f} %"


def milliseconds(value: float) -> str:
    """A time with three significant digits, in ms or, from one second, in s."""
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    return f"{value:.3g} ms"
