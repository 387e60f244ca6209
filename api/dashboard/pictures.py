"""Pictures of a job, each served as an image of its own: inside one, a strict policy for pages does not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from api.dashboard.facts import JobFacts
from onboarding.stages.align.result import AlignResult, Curves
from onboarding.stages.gaps.result import GapsResult


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


PICTURES: dict[str, Callable[[JobFacts], str | None]] = {
    "loss": loss_svg,
    "layers": layers_svg,
    "shares": shares_svg,
    "roofline": roofline_svg,
}


@lru_cache(maxsize=64)
def _draw(name: str, data: str) -> str:
    """Rendering takes some hundred milliseconds, so the same data is drawn once."""
    from onboarding.pictures import charts

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
