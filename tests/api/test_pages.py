"""Pages as a server renders them: complete without scripts, and nothing untrusted is markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest
from fastapi.testclient import TestClient

from api.dashboard import formats
from api.dashboard.gantt import gantt, tick_step
from api.views import stage_views
from onboarding.pipeline import STAGES
from onboarding.records import Job, Step
from tests.api.story import DIGESTS, HOSTILE, Story

TABS = ("model", "gaps", "kernels", "numerics", "training", "throughput", "scale", "agent", "artifacts")


class Checker(HTMLParser):
    """Collects what a strict policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look for inline style, handlers and foreign sources."""
        given = dict(attrs)
        self.faults += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and not (given.get("src") or "").startswith("/static/")):
            self.faults.append(tag)
        self.faults += [v for n, v in attrs if n in ("src", "href", "action") and v and not v.startswith(("/", "#"))]

    def handle_data(self, data: str) -> None:
        """Keep the text."""
        self.text += data


def read(client: TestClient, path: str) -> str:
    """A page's text, checked."""
    answer = client.get(path, headers={"accept": "text/html"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert HOSTILE not in answer.text
    checker = Checker()
    checker.feed(answer.text)
    assert checker.faults == []
    return checker.text


@pytest.mark.parametrize("tab", TABS)
def test_a_new_jobs_tabs_say_what_will_appear(client: TestClient, story: Callable[..., Story], tab: str) -> None:
    text = read(client, f"/jobs/{story().id}?tab={tab}")
    assert "appear" in text
    for stage in STAGES:  # the Gantt is there from the first second
        assert stage.verb in text


@pytest.mark.parametrize(
    ("tab", "words"),
    [
        ("model", ["49.1 B", "KDA", "routed experts", "94 %", HOSTILE]),
        ("gaps", ["3 operator specs", "torch linear", "projection"]),
        ("kernels", ["accepted", "3 / 3", "0.71"]),
        ("numerics", ["layers.4", "0.20", "4 modules"]),
        ("training", ["inside the band", "p = 0.63", "5.545"]),
        ("throughput", ["1.25 x", "KDA, MoE 256 experts", "head and loss", "no GPU here"]),
        (
            "scale",
            [
                "128 x NVIDIA H200 SXM",
                "ep_across",
                "rank r holds experts 4",
                "3.61 s at 1.5 x",
                "all-to-all over 64",
                "2.0e-08",
            ],
        ),
        ("artifacts", ["onboard bundle pull", "report.html", "ab" * 32]),
    ],
)
def test_a_finished_jobs_tabs(client: TestClient, story: Callable[..., Story], tab: str, words: list[str]) -> None:
    text = read(client, f"/jobs/{story().tell().id}?tab={tab}")
    for word in words:
        assert word in text


def test_a_kernels_page(client: TestClient, story: Callable[..., Story]) -> None:
    job = story().tell()
    for words, key in DIGESTS.items():
        text = read(client, f"/jobs/{job.id}/kernels/{key}")
        for word in (words, "accepted", "odd tail", "sign flip", "def forward", HOSTILE, "interpreter"):
            assert word in text
    assert client.get(f"/jobs/{job.id}/kernels/{'0' * 64}").status_code == 404


def test_a_hostile_name_and_log(client: TestClient, story: Callable[..., Story]) -> None:
    job = story(HOSTILE)
    job.begin("intake")
    job.log("intake", HOSTILE)
    assert read(client, f"/jobs/{job.id}").count(HOSTILE) >= 3
    assert HOSTILE in read(client, "/")


def test_failures_show_cause_and_retry(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.begin("intake")
    job.fail("intake", {"type": "t", "title": "config.json has no layers", "detail": "add it", "status": 422})
    text = read(client, f"/jobs/{job.id}")
    assert "config.json has no layers" in text
    assert "Retry" in text
    answer = client.post(f"/jobs/{job.id}/retry")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/jobs/{job.id}")
    assert "attempt 2" in read(client, f"/jobs/{job.id}")


def test_the_form_submits_an_example(client: TestClient) -> None:
    answer = client.post("/jobs", data={"example": "kimi-linear", "profile": "quick"})
    assert answer.status_code == 303
    assert "kimi-linear" in read(client, answer.headers["location"])


@pytest.mark.parametrize(
    "name", ["loss", "layers", "shares", "roofline", "step", "reached", "scaling-adapters", "parts-adapters"]
)
def test_pictures(client: TestClient, story: Callable[..., Story], name: str) -> None:
    new, done = story(), story().tell()
    assert client.get(f"/jobs/{new.id}/pictures/{name}.svg").status_code == 404
    answer = client.get(f"/jobs/{done.id}/pictures/{name}.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.text.startswith("<svg")
    assert "script" not in answer.headers["content-security-policy"]


def test_the_model_tab_shows_blocks_and_weights(client: TestClient, story: Callable[..., Story]) -> None:
    job = story().tell()
    text = read(client, f"/jobs/{job.id}?tab=model")
    assert "7 of 8 tensors of the model are filled" in text
    assert "1 TiB" in text
    assert "Nothing fills model.norm.weight" in text
    assert "came back bit for bit" in text
    assert "Compare" not in text, "there is no other job yet"
    page = client.get(f"/jobs/{job.id}?tab=model").text
    assert 'aria-label="kimi-linear: 2 kinds of blocks"' in page
    assert "<script>alert" not in page


def test_the_gaps_tab_says_who_serves_and_what_bounds(client: TestClient, story: Callable[..., Story]) -> None:
    job = story().tell()
    text = read(client, f"/jobs/{job.id}?tab=gaps")
    assert "Who serves the step" in text
    assert "transformers eager" in text
    assert "compute" in text
    assert "/pictures/roofline.svg" in client.get(f"/jobs/{job.id}?tab=gaps").text


def test_two_architectures_are_compared(client: TestClient, story: Callable[..., Story]) -> None:
    one, other = story().tell(), story().tell()
    address = f"/jobs/{one.id}/compare?with={other.id}"
    assert f"/jobs/{one.id}/compare" in client.get(f"/jobs/{one.id}?tab=model").text
    text = read(client, address)
    assert "0 things new or changed; 100 % of all features shared" in text
    assert "mixer: KDA" in text
    for wrong in ("0" * 26, "x", one.id.lower()):
        assert client.get(f"/jobs/{one.id}/compare", params={"with": wrong}).status_code in (404, 422)
    assert client.get(f"/jobs/{one.id}/compare").status_code == 422
    assert client.get(f"/jobs/{one.id}/compare", params={"with": story().id}).status_code == 404


def test_the_live_curve_before_the_result(client: TestClient, story: Callable[..., Story]) -> None:
    job = story()
    job.tell_until_gaps()
    job.tell_kernels()
    job.begin("align")
    for series in ("loss reference", "loss candidate"):
        job.metrics(*((series, step, 5.0 - step) for step in range(3)))
    assert "3.000000" in read(client, f"/jobs/{job.id}?tab=training")
    assert client.get(f"/jobs/{job.id}/pictures/loss.svg").status_code == 200


def test_static_files_and_nothing_else(client: TestClient) -> None:
    page = client.get("/").text
    for address in re.findall(r'"(/static/[^"]+)"', page):
        answer = client.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    for path in ("/static/..%2fapp.py", "/static/nothing.js", "/static/"):
        assert client.get(path).status_code == 404


class TestGantt:
    """Bars lie where times say."""

    START = datetime(2026, 1, 1, tzinfo=UTC)

    def at(self, seconds: float) -> datetime:
        """A moment after the start."""
        return self.START + timedelta(seconds=seconds)

    def job(self) -> Job:
        """A job that started at the start."""
        job = Job(id="j", name="n", model_type="m", owner="o", definition="d", options={})
        job.created_at = job.started_at = self.START
        return job

    def step(self, stage: str, begin: float, end: float | None, key: str = "", attempt: int = 1) -> Step:
        """A step with its times."""
        finished = None if end is None else self.at(end)
        state = "running" if end is None else "succeeded"
        return Step(
            job_id="j",
            stage=stage,
            key=key,
            attempt=attempt,
            state=state,
            started_at=self.at(begin),
            finished_at=finished,
        )

    def test_positions(self) -> None:
        steps = [self.step("intake", 0, 10), self.step("parse", 10, None)]
        drawn = gantt(self.job(), steps, stage_views(steps, {}), now=self.at(40))
        intake, parse = drawn.rows[0].bars[0], drawn.rows[1].bars[0]
        assert (intake.x, intake.width) == (0, 250)
        assert (parse.x, parse.width) == (250, 750)
        assert drawn.span_s == 40
        assert [seconds for _, seconds in drawn.ticks] == [0, 10, 20, 30, 40]
        assert len(drawn.rows) == len(STAGES)

    def test_operators_have_lanes_and_old_attempts_fade(self) -> None:
        steps = [self.step("judge", 0, 5, "a"), self.step("judge", 0, 9, "b"), self.step("judge", 5, 20, "a", 2)]
        bars = gantt(self.job(), steps, stage_views(steps, {}), now=self.at(20)).rows[4].bars
        assert [(bar.y, bar.old) for bar in bars] == [(0, True), (50, False), (0, False)]

    def test_a_short_stage_can_be_seen(self) -> None:
        steps = [self.step("intake", 3599.9, 3600)]
        bar = gantt(self.job(), steps, stage_views(steps, {}), now=self.at(3600)).rows[0].bars[0]
        assert bar.width == 4
        assert bar.x + bar.width <= 1000

    @pytest.mark.parametrize("span", [10, 35, 61, 400, 5000, 90_000])
    def test_three_to_six_ticks(self, span: float) -> None:
        assert 1 <= span / tick_step(span) <= 6


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (formats.count, 49_100_000_000, "49.1 B"),
        (formats.count, 999_999, "1 M"),
        (formats.count, 27, "27"),
        (formats.flops, 2.5e12, "2.5 TFLOP"),
        (formats.flops, 3e9, "3 GFLOP"),
        (formats.size, 1536, "1.5 KiB"),
        (formats.duration, 0.31, "0.3 s"),
        (formats.duration, 96.4, "96.4 s"),
        (formats.duration, 130, "2 m 10 s"),
        (formats.duration, 7500, "2 h 05 m"),
        (formats.percent, 0.61, "61 %"),
        (formats.percent, 0.0041, "0.4 %"),
        (formats.percent, 0.0001, "< 0.1 %"),
        (formats.percent, 0.0, "0.0 %"),
        (formats.milliseconds, 3780, "3.78 s"),
        (formats.milliseconds, 4.96, "4.96 ms"),
        (formats.milliseconds, 0.0688, "68.8 us"),
    ],
)
def test_formats(function: Callable[[float], str], value: float, shown: str) -> None:
    assert function(value) == shown
