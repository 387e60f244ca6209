"""The dashboard in a real browser: live, keyboard, phone, dark, and not one violation of its policy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.app import create_app
from api.auth import ensure_first_key, sign_in_url
from api.deps import Services
from onboarding.pipeline import STAGES
from onboarding.settings import Settings
from tests.api.live_server import free_port, serving
from tests.api.story import DIGESTS, HOSTILE, Story

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("ONBOARD_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
WATCH_POLICY = "document.addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium that is installed; its absence is a failure in CI only."""
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have Chromium")
        pytest.skip("no Chromium: install it, or set ONBOARD_TEST_CHROMIUM")
    # Chromium's own sandbox refuses to run as root.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield opened
        opened.close()


class Site:
    """A running service, and pages signed in to it."""

    def __init__(self, browser: Browser, base: str, services: Services, settings: Settings) -> None:
        self.browser, self.base, self.services, self.settings = browser, base, services, settings
        self.owner = ensure_first_key(services.store, settings).owner
        self.complaints: list[str] = []

    def story(self, name: str = "kimi-linear") -> Story:
        """A job."""
        return Story(self.services.store, self.services.artifacts, self.settings, self.owner, name)

    def page(self, *, signed_in: bool = True, **context: Any) -> Page:
        """A fresh browser profile."""
        page = self.browser.new_context(**context).new_page()
        page.add_init_script(WATCH_POLICY)
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", self._failed)
        if signed_in:
            page.goto(sign_in_url(self.services.store, self.owner, self.base))
            expect(page.locator("h1")).to_be_visible()
        return page

    def _failed(self, request: Any) -> None:
        # Leaving a page ends its event stream and its last poll: that is no complaint.
        if "ERR_ABORTED" not in (request.failure or ""):
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def open(self, page: Page, path: str) -> None:
        """Go to a page of ours."""
        answer = page.goto(self.base + path)
        assert answer is not None
        assert answer.ok


@pytest.fixture
def site(browser: Browser, home: Path) -> Iterator[Site]:
    """The service, and at the end: no complaint of any page."""
    port = free_port()
    settings = Settings(port=port)
    app = create_app(settings)
    with serving(app, port) as base:
        opened = Site(browser, base, app.state.services, settings)
        yield opened
        for context in browser.contexts:
            context.close()
    assert opened.complaints == []


def test_without_the_link_there_is_only_an_explanation(site: Site) -> None:
    page = site.page(signed_in=False)
    page.goto(site.base + "/")
    expect(page.locator("h1")).to_have_text("Sign in")
    # The refused navigation itself is logged by the browser.
    site.complaints = [line for line in site.complaints if "401" not in line]


def test_the_gantt_fills_while_the_job_runs(site: Site) -> None:
    story = site.story()
    page = site.page()
    site.open(page, f"/jobs/{story.id}")
    rows = page.locator("#gantt .stage")
    expect(rows).to_have_count(len(STAGES))
    expect(page.locator("#gantt .step")).to_have_count(0)
    expect(page.locator("#panel")).to_contain_text("architecture appears after parse")
    begun = page.evaluate("performance.timeOrigin")

    story.begin("intake")
    expect(rows.nth(0).locator(".stage-state")).to_have_text("running")
    expect(page.locator("#log")).to_contain_text("intake begins")
    story.log("intake", f"unpacking {HOSTILE}")
    expect(page.locator("#log")).to_contain_text(HOSTILE)
    story.progress("intake", 1, 2, "unpacking config.json")
    expect(rows.nth(0)).to_contain_text("50 %")
    expect(rows.nth(0)).to_contain_text("unpacking config.json")
    bar = page.locator("#gantt .step.running")
    first = float(bar.get_attribute("width") or 0)
    expect(bar).not_to_have_attribute("width", str(first), timeout=8000)  # it grows by itself

    from tests.api.story import intake_result

    story.end("intake", intake_result(story))
    expect(rows.nth(0).locator(".stage-state")).to_have_text("ok")
    story.begin("parse")
    expect(page.locator("#log-head")).to_contain_text("parse")  # the log follows the running stage
    expect(page.locator("#log")).not_to_contain_text("intake begins")
    from onboarding.stages.parse.result import ParseResult
    from tests.api.story import architecture, gaps_result

    story.end("parse", ParseResult(architecture=architecture(), seconds=1.0, summary="27 layers"))
    expect(page.locator("#panel")).to_contain_text("49.1 B")
    expect(page.locator("#panel .strip rect")).to_have_count(27)
    story.do("gaps", gaps_result())
    story.tell_kernels()
    story.tell_align()
    story.tell_speed()
    story.tell_package()
    expect(page.locator("#title")).to_have_attribute("data-state", "succeeded")
    expect(page.locator("#title")).to_contain_text("Download bundle")
    expect(page.locator("#gantt .step.succeeded, #gantt .step.skipped")).to_have_count(7 + 3 * 3)
    assert page.evaluate("performance.timeOrigin") == begun  # never reloaded


def test_every_tab_and_kernel_page(site: Site) -> None:
    story = site.story().tell()
    page = site.page()
    site.open(page, f"/jobs/{story.id}")
    for number, words in enumerate(
        [
            "49.1 B",
            "without a fast provider",
            "accepted",
            "Layer by layer",
            "inside the band",
            "trained and timed",
            "128 x NVIDIA H200 SXM",
            "No language model took part",
            "report.html",
        ],
        start=1,
    ):
        page.keyboard.press(str(number))
        expect(page.locator("#panel")).to_contain_text(words)
        expect(page.locator(".tabs [aria-current]")).to_have_attribute("data-tab", str(number))
        for image in page.locator("#panel img").all():
            expect(image).to_have_js_property("complete", True)
            assert image.evaluate("image => image.naturalWidth") > 100
    site.open(page, f"/jobs/{story.id}/kernels/{next(iter(DIGESTS.values()))}")
    expect(page.locator(".code").first).to_contain_text("def forward")
    page.locator("summary").first.click()
    expect(page.locator(".tensors").first).to_contain_text("grad g")


def test_keyboard(site: Site) -> None:
    first, second = site.story("alpha"), site.story("beta")
    page = site.page()
    site.open(page, f"/jobs/{second.id}")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.base}/jobs/{first.id}")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.base}/jobs/{second.id}")
    page.keyboard.press("/")
    page.keyboard.type("alph")
    page.keyboard.press("Enter")
    expect(page.locator("#jobs li")).to_have_count(1)
    expect(page.locator("#jobs")).to_contain_text("alpha")


def test_the_log_pane_filters_and_pauses(site: Site) -> None:
    story = site.story()
    story.begin("intake")
    story.log("intake", "one apple")
    story.log("intake", "one pear")
    page = site.page()
    site.open(page, f"/jobs/{story.id}")
    page.locator("#log-filter").fill("APPLE")
    expect(page.locator("#log")).to_have_text("one apple")
    page.locator("#log-filter").fill("")
    page.locator("#log-pause").click()
    story.log("intake", "one plum")
    expect(page.locator("#log-pause")).to_have_text("Resume")
    expect(page.locator("#log")).not_to_contain_text("plum")
    page.locator("#log-pause").click()
    expect(page.locator("#log")).to_contain_text("one plum")
    with page.expect_download() as download:
        page.locator(".log-head .button").click()
    assert Path(download.value.path()).read_text().splitlines()[-1] == "one plum"


def test_cancel_and_retry_by_button(site: Site) -> None:
    story = site.story()
    page = site.page()
    site.open(page, f"/jobs/{story.id}")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#title")).to_have_attribute("data-state", "cancelled")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#gantt .stage").first).to_contain_text("attempt 2")


def test_no_width_scrolls_sideways(site: Site) -> None:
    story = site.story("a-model-with-a-very-long-name-that-has-no-place-to-break-48b-a3b-instruct").tell()
    page = site.page()
    paths = ["/", "/docs", f"/jobs/{story.id}/kernels/{next(iter(DIGESTS.values()))}"]
    paths += [
        f"/jobs/{story.id}?tab={tab}"
        for tab in ("model", "gaps", "kernels", "numerics", "training", "throughput", "scale", "agent", "artifacts")
    ]
    for path in paths:
        site.open(page, path)
        for width in (360, 390, 768, 1440, 2200):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)`` (WCAG 2.2)."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(site: Site, scheme: Any) -> None:
    story = site.story().tell()
    page = site.page(color_scheme=scheme)
    site.open(page, f"/jobs/{story.id}?tab=kernels")
    ground = page.locator("#panel").evaluate("item => getComputedStyle(item).backgroundColor")
    assert (luminance(ground) < 0.1) is (scheme == "dark")
    for selector in ("#panel h2", "#panel th", ".stage-note", ".stage.succeeded .stage-state", "#panel a", ".facts"):
        ink = page.locator(selector).first.evaluate("item => getComputedStyle(item).color")
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (selector, ink)  # WCAG AA for text


def test_readable_with_scripts_off(site: Site) -> None:
    story = site.story().tell()
    page = site.page(java_script_enabled=False)
    site.open(page, f"/jobs/{story.id}?tab=numerics&stage=judge")
    expect(page.locator("#gantt .step.succeeded")).to_have_count(7 + 2 * 3)
    expect(page.locator("#log")).to_contain_text("judge begins")
    expect(page.locator("#panel")).to_contain_text("layers.4")
    expect(page.locator(".log-tools")).to_be_hidden()
    page.locator(".tabs a", has_text="Gaps").click()
    expect(page.locator("#panel")).to_contain_text("without a fast provider")


def test_the_stream_comes_back_after_a_restart(browser: Browser, home: Path) -> None:
    port = free_port()
    settings = Settings(port=port)
    with serving(create_app(settings), port) as base:
        app = create_app(settings)
        site = Site(browser, base, app.state.services, settings)
        story = site.story()
        page = site.page()
        site.open(page, f"/jobs/{story.id}")
        expect(page.locator("#gantt .stage").first).to_contain_text("queued")
    story.begin("intake")  # while nobody listens
    with serving(create_app(settings), port):
        expect(page.locator("#gantt .stage-state").first).to_have_text("running", timeout=15_000)
    page.context.close()
