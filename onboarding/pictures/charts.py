"""Charts: Vega-Lite specifications by Altair, rendered to SVG here by vl-convert. No browser, no script in the page."""

from __future__ import annotations

import math
from typing import Any

from onboarding.stages.align.result import Curves, LayerError
from onboarding.stages.gaps.result import GapsResult, OperatorRow

REFERENCE, CANDIDATE, BAND = "#0072B2", "#D55E00", "#9ecae1"
# A middle grey reads on white and on near-black, so one picture serves both colour schemes.
INK = "#808080"


def render(chart: Any) -> str:
    """An Altair chart as SVG text with a transparent background."""
    import vl_convert

    themed = chart.configure(background="transparent").configure_axis(
        labelColor=INK, titleColor=INK, gridColor="#80808040", domainColor=INK, tickColor=INK
    )
    themed = themed.configure_legend(labelColor=INK, titleColor=INK, orient="top").configure_view(strokeOpacity=0)
    return str(vl_convert.vegalite_to_svg(themed.to_dict()))


def loss_curves(curves: Curves, *, width: int = 640, height: int = 280) -> str:
    """Reference and candidate loss by step, with the band around the reference."""
    import altair as alt

    band = [
        {"step": s, "low": r - b, "high": r + b}
        for s, r, b in zip(curves.steps, curves.reference, curves.band, strict=True)
    ]
    lines = [
        {"step": step, "loss": loss, "run": run}
        for run, values in (("reference", curves.reference), ("candidate", curves.candidate))
        for step, loss in zip(curves.steps, values, strict=True)
        if math.isfinite(loss)
    ]
    area = (
        alt.Chart(alt.Data(values=band))
        .mark_area(color=BAND, opacity=0.6)
        .encode(x=alt.X("step:Q", title="optimizer step"), y=alt.Y("low:Q", title="loss (nats a byte)"), y2="high:Q")
    )
    scale = alt.Scale(domain=["reference", "candidate"], range=[REFERENCE, CANDIDATE])
    line = (
        alt.Chart(alt.Data(values=lines))
        .mark_line(point=alt.OverlayMarkDef(size=18))
        .encode(
            x="step:Q",
            y=alt.Y("loss:Q", scale=alt.Scale(zero=False)),
            color=alt.Color("run:N", scale=scale, title=None),
            # the same field and title as the colour, so that both share one legend
            strokeDash=alt.StrokeDash(
                "run:N", title=None, scale=alt.Scale(domain=["reference", "candidate"], range=[[1, 0], [5, 4]])
            ),
        )
    )
    return render((area + line).properties(width=width, height=height))


def layer_errors(layers: list[LayerError], *, width: int = 640) -> str:
    """Relative RMS error of every compared tensor as a share of its tolerance, on a logarithmic axis."""
    import altair as alt

    rows = [
        {"order": i, "name": e.name, "kind": e.kind, "share": max(e.share, 1e-4)}
        for i, e in enumerate(layers)
        if math.isfinite(e.share)
    ]
    points = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=36)
        .encode(
            x=alt.X("order:Q", title="tensor, from input to output"),
            y=alt.Y("share:Q", scale=alt.Scale(type="log"), title="error / tolerance"),
            color=alt.Color(
                "kind:N", title=None, scale=alt.Scale(domain=["output", "gradient"], range=[REFERENCE, CANDIDATE])
            ),
            shape=alt.Shape("kind:N", legend=None),
        )
    )
    limit = alt.Chart(alt.Data(values=[{"y": 1.0}])).mark_rule(strokeDash=[6, 4], color=INK).encode(y="y:Q")
    return render((points + limit).properties(width=width, height=240))


def time_shares(rows: list[OperatorRow], *, width: int = 640) -> str:
    """Projected time of the step by operator, gaps marked."""
    import altair as alt

    top = sorted(rows, key=lambda r: -r.share_time)[:14]
    data = [
        {
            "operator": r.name if len(r.name) <= 48 else r.name[:45] + "...",
            "share": 100 * r.share_time,
            "state": "gap" if r.gap else "served",
        }
        for r in top
    ]
    bars = (
        alt.Chart(alt.Data(values=data))
        .mark_bar()
        .encode(
            y=alt.Y("operator:N", sort=None, title=None, axis=alt.Axis(labelLimit=340)),
            x=alt.X("share:Q", title="share of the step's projected time (%)"),
            color=alt.Color(
                "state:N", title=None, scale=alt.Scale(domain=["gap", "served"], range=[CANDIDATE, REFERENCE])
            ),
        )
    )
    return render(bars.properties(width=width, height=alt.Step(20)))


def roofline(result: GapsResult, *, width: int = 640, height: int = 320) -> str:
    """Every operator of the step by its FLOPs a byte and what its provider reaches, under the device's two limits.

    Raises:
        ValueError: the result is of a version that stored no roofline.
    """
    import altair as alt

    limits = result.roofline
    if limits is None:
        raise ValueError("the result holds no roofline")
    points = [
        {
            "operator": row.name,
            "intensity": min(max(row.intensity, 1e-2), 1e5),
            "reached": max(row.flops / (row.provider_ms * 1e9), 1e-3),
            "share": 100 * row.share_time,
            "state": "gap" if row.gap else "served",
        }
        for row in result.rows
        if row.flops > 0 and row.provider_ms > 0
    ]
    line = [{"intensity": x, "reached": min(limits.tflops, x * limits.bandwidth)} for x in (1e-2, limits.ridge, 1e5)]
    x = alt.X("intensity:Q", title="FLOPs a byte", scale=alt.Scale(type="log", domain=[1e-2, 1e5]))
    y = alt.Y("reached:Q", title="TFLOP/s (projected)", scale=alt.Scale(type="log"))
    roof = alt.Chart(alt.Data(values=line)).mark_line(color=INK, strokeWidth=2).encode(x=x, y=y)
    marks = (
        alt.Chart(alt.Data(values=points))
        .mark_point(filled=True, opacity=0.85)
        .encode(
            x=x,
            y=y,
            size=alt.Size("share:Q", title="share of the step (%)", scale=alt.Scale(range=[30, 600])),
            color=alt.Color(
                "state:N", title=None, scale=alt.Scale(domain=["gap", "served"], range=[CANDIDATE, REFERENCE])
            ),
            shape=alt.Shape("state:N", title=None, scale=alt.Scale(domain=["gap", "served"])),
        )
    )
    return render((roof + marks).properties(width=width, height=height))
