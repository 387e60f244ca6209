"""Pictures and report of measured speed and projected scale: they carry the data, escaped, and say what they are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from onboarding.artifacts import ArtifactRef
from onboarding.pictures.speed import measured_roofline, scaling_curve, step_breakdown, step_parts
from onboarding.stages.intake.result import IntakeResult
from onboarding.stages.package.facts import Facts, _not_measured
from onboarding.stages.package.report.render import render_report
from onboarding.stages.parse.result import ParseResult
from onboarding.stages.scale.result import ScaleResult
from onboarding.stages.throughput.result import ThroughputResult
from tests.api.story import HOSTILE, align_result, architecture, gaps_result, scale_result, throughput_result


def words(svg: str) -> str:
    """All text of a picture that parses as XML."""
    return " ".join(ElementTree.fromstring(svg).itertext())


def test_pictures_carry_their_data_and_say_measured_or_projected() -> None:
    measured, projection = throughput_result(), scale_result().modes[0].projection
    assert projection is not None
    for svg, expected in (
        (step_breakdown(measured), ["K: KDA, MoE", "head and loss", "measured"]),
        (measured_roofline(measured), ["measured", "FLOPs a byte"]),
        (scaling_curve(projection), ["projected", "efficiency", "all-to-all"]),
        (step_parts(projection), ["projected", "matrix products"]),
    ):
        assert HOSTILE not in svg
        for word in expected:
            assert word in words(svg)


def test_a_cpu_has_no_roofline() -> None:
    with pytest.raises(ValueError, match="no roofline points"):
        measured_roofline(throughput_result().model_copy(update={"points": []}))


def facts(throughput: ThroughputResult | None, scale: ScaleResult | None) -> Facts:
    ref = ArtifactRef(name="d.tar", digest="0" * 64, size=1, media_type="application/x-tar")
    intake = IntakeResult(
        name="kimi-linear", model_type="kimi_linear", source="example", digest="9f" * 32, definition=ref, config={},
        files=["config.json"], has_code=False, has_tokenizer=False,
    )  # fmt: skip
    align = align_result()
    return Facts(
        job_id="j", profile="quick", intake=intake, parse=ParseResult(architecture=architecture(), seconds=1.0),
        gaps=gaps_result(), kernels=[], align=align, throughput=throughput, scale=scale,
        not_measured=_not_measured([], align, throughput, scale),
    )  # fmt: skip


def test_the_report_tells_speed_and_scale() -> None:
    page = render_report(facts(throughput_result(), scale_result()), bundle_name="b")
    assert HOSTILE not in page
    for word in ("1.25 x", "1.2 k", "Projections, not measurements", "EP 64 x 2",
                 "rank r holds experts 4", "3.61 s at 1.5 x",
                 "too large",
                 "104 all-to-all over 64", "within 2.0e-08 of one process", "Nothing ran on 128 devices."):  # fmt: skip
        assert word in page, word


def test_the_report_says_what_there_is_not() -> None:
    page = render_report(facts(None, None), bundle_name="b")
    assert "the model was not trained under the runtime" in page
    assert "nothing was planned for several devices" in page
