"""Charts of measured speed and projected scale."""

from __future__ import annotations

import math

from onboarding.pictures.charts import CANDIDATE, INK, REFERENCE, render
from onboarding.stages.scale.result import Projection
from onboarding.stages.throughput.result import ThroughputResult

OTHER = "#009E73"


def step_breakdown(result: ThroughputResult, *, width: int = 640) -> str:
    """Milliseconds of one step by block kind, forward and backward."""
    import altair as alt

    rows = [
        {"kind": _short(row.kind), "ms": ms, "pass": word}
        for row in result.breakdown
        for word, ms in (("forward", row.forward_ms), ("backward", row.backward_ms))
        if ms > 0
    ]
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            y=alt.Y("kind:N", sort=None, title=None, axis=alt.Axis(labelLimit=340)),
            x=alt.X("ms:Q", title=f"milliseconds of one step on {result.device} (measured)"),
            color=alt.Color(
                "pass:N", title=None, scale=alt.Scale(domain=["forward", "backward"], range=[REFERENCE, CANDIDATE])
            ),
            order=alt.Order("pass:N", sort="descending"),
        )
    )
    return render(bars.properties(width=width, height=alt.Step(24)))


def measured_roofline(result: ThroughputResult, *, width: int = 640, height: int = 300) -> str:
    """What each block kind reaches in forward, under the device's two limits.

    Raises:
        ValueError: the result holds no points.
    """
    import altair as alt

    limits = result.roofline
    if limits is None or not result.points:
        raise ValueError("the result holds no roofline points")
    line = [{"x": x, "y": min(limits.tflops, x * limits.bandwidth)} for x in (1.0, limits.ridge, 1e5)]
    points = [{"x": p.intensity, "y": p.tflops, "kind": _short(p.kind)} for p in result.points]
    x = alt.X("x:Q", title="FLOPs a byte", scale=alt.Scale(type="log"))
    y = alt.Y("y:Q", title="TFLOP/s (measured)", scale=alt.Scale(type="log"))
    roof = alt.Chart(alt.Data(values=line)).mark_line(color=INK, strokeWidth=2).encode(x=x, y=y)
    marks = (
        alt.Chart(alt.Data(values=points))
        .mark_point(filled=True, size=90)
        .encode(x=x, y=y, color=alt.Color("kind:N", title=None), shape=alt.Shape("kind:N", title=None))
    )
    return render((roof + marks).properties(width=width, height=height))


def scaling_curve(projection: Projection, *, width: int = 640, height: int = 260) -> str:
    """Projected efficiency and share of all-to-all by number of devices."""
    import altair as alt

    rows = [
        {"devices": point.devices, "share": 100 * value, "what": word}
        for point in projection.curve
        for word, value in (("efficiency", point.efficiency), ("all-to-all of the step", point.all_to_all_share))
    ]
    scale = alt.Scale(domain=["efficiency", "all-to-all of the step"], range=[REFERENCE, CANDIDATE])
    top = max(100, 20 * math.ceil(max(100 * point.efficiency for point in projection.curve) / 20))
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "devices:Q",
                title="devices",
                scale=alt.Scale(type="log", base=2),
                axis=alt.Axis(values=[point.devices for point in projection.curve], format="d", labelOverlap=True),
            ),
            y=alt.Y(
                "share:Q",
                title="% (projected)",
                scale=alt.Scale(domain=[0, top]),
                axis=alt.Axis(values=list(range(0, top + 1, 20))),
            ),
            color=alt.Color("what:N", title=None, scale=scale),
            strokeDash=alt.StrokeDash(
                "what:N",
                title=None,
                scale=alt.Scale(domain=["efficiency", "all-to-all of the step"], range=[[1, 0], [5, 4]]),
            ),
        )
    )
    return render(lines.properties(width=width, height=height))


def step_parts(projection: Projection, *, width: int = 640) -> str:
    """Projected milliseconds of one step by what they are spent on."""
    import altair as alt

    rows = [{"part": part.name, "ms": 1e3 * part.seconds} for part in projection.parts if part.seconds > 0]
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(color=OTHER)
        .encode(
            y=alt.Y("part:N", sort=None, title=None, axis=alt.Axis(labelLimit=340)),
            x=alt.X("ms:Q", title="milliseconds of one step (projected)"),
        )
    )
    return render(bars.properties(width=width, height=alt.Step(22)))


def _short(words: str) -> str:
    return words if len(words) <= 48 else words[:45] + "..."
