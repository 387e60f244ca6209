"""Pictures of a job, each served as an image of its own: inside one, a strict policy for pages does not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from api.dashboard.facts import JobFacts
from onboarding.stages.align.result import AlignResult, Curves
from onboarding.stages.gaps.result import GapsResult
from onboarding.stages.scale.result import Projection
from onboarding.stages.throughput.result import ThroughputResult


def loss_svg(facts: JobFacts) -> str | None:
    """The two loss curves: from the result, or live from the metrics while alignment runs."""
    curves = facts.curves()
    return None if curves is None else _draw("loss", curves.model_dump_json())


def layers_svg(facts: JobFacts) -> str | None:
    """Layer errors as shares of their tolerances."""
    return None if facts.align is None else _draw("layers", facts.align.model_dump_json())


def shares_svg(facts: JobFacts) -> str | None:
    """Projected time of the step by operator."""
    return None if facts.gaps is None else _draw("shares", facts.gaps.model_dump_json())


def roofline_svg(facts: JobFacts) -> str | None:
    """Operators under the device's roofline; results of older versions hold none."""
    if facts.gaps is None or facts.gaps.roofline is None:
        return None
    return _draw("roofline", facts.gaps.model_dump_json())


def step_svg(facts: JobFacts) -> str | None:
    """Measured time of one step by block kind."""
    return None if facts.throughput is None else _draw("step", facts.throughput.model_dump_json())


def reached_svg(facts: JobFacts) -> str | None:
    """Block kinds under the measured roofline; on a CPU there are none."""
    found = facts.throughput
    return None if found is None or not found.points else _draw("reached", found.model_dump_json())


def _projection(facts: JobFacts, mode: str) -> str | None:
    found = None if facts.scale is None else next((m.projection for m in facts.scale.modes if m.mode == mode), None)
    return None if found is None else found.model_dump_json()


def projected(picture: str, mode: str) -> Callable[[JobFacts], str | None]:
    """A picture of the projection of one way of training."""

    def draw(facts: JobFacts) -> str | None:
        data = _projection(facts, mode)
        return None if data is None else _draw(picture, data)

    return draw


PICTURES: dict[str, Callable[[JobFacts], str | None]] = {
    "loss": loss_svg,
    "layers": layers_svg,
    "shares": shares_svg,
    "roofline": roofline_svg,
    "step": step_svg,
    "reached": reached_svg,
    **{
        f"{picture}-{mode}": projected(picture, mode)
        for picture in ("scaling", "parts")
        for mode in ("adapters", "full")
    },
}


@lru_cache(maxsize=64)
def _draw(name: str, data: str) -> str:
    """Rendering takes some hundred milliseconds, so the same data is drawn once."""
    from onboarding.pictures import charts, speed

    if name == "step":
        return speed.step_breakdown(ThroughputResult.model_validate_json(data))
    if name == "reached":
        return speed.measured_roofline(ThroughputResult.model_validate_json(data))
    if name in ("scaling", "parts"):
        draw = speed.scaling_curve if name == "scaling" else speed.step_parts
        return draw(Projection.model_validate_json(data))
    if name == "loss":
        return charts.loss_curves(Curves.model_validate_json(data))
    if name == "layers":
        return charts.layer_errors(AlignResult.model_validate_json(data).layers)
    if name == "roofline":
        return charts.roofline(GapsResult.model_validate_json(data))
    return charts.time_shares(GapsResult.model_validate_json(data).rows)


def version(model: Any) -> str:
    """A short digest of the data behind a picture, for its address."""
    return hashlib.sha256(model.model_dump_json().encode()).hexdigest()[:12]
