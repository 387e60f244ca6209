"""The command line against a service on a real socket."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from api.app import create_app
from api.auth import ensure_first_key
from api.cli import live, main, service, tables
from api.deps import Services
from onboarding.examples import example_path
from onboarding.settings import Settings
from onboarding.stages.package.signing import sign_folder, signing_key
from onboarding.stages.package.stage import archive
from tests.api.live_server import free_port, serving
from tests.api.story import HOSTILE, Story, architecture, gaps_result

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; gives exit code, output, messages."""

    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onboard", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return go


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Story]]:
    """A running service that the command line finds; makes jobs of its first key."""
    port = free_port()
    monkeypatch.setenv("ONBOARD_PORT", str(port))
    settings = Settings()
    app = create_app(settings)
    services: Services = app.state.services
    with serving(app, port):
        owner = ensure_first_key(services.store, settings).owner
        yield lambda name="kimi-linear": Story(services.store, services.artifacts, settings, owner, name)


def bundled(story: Story, folder: Path) -> Path:
    """Tell a whole job whose bundle is a real, signed archive; returns the folder it was made from."""
    root = folder / "kimi-linear-0.1.0"
    (root / "kernels").mkdir(parents=True)
    (root / "kernels" / "k.py").write_text("x = 1\n")
    (root / "report.html").write_text("<h1>report</h1>")
    key, _ = sign_folder(root, signing_key(folder / "key.pem"))
    story.tell_until_gaps()
    story.tell_kernels()
    story.tell_align()
    story.tell_speed()
    story.begin("package")
    refs = {
        "bundle": story.save("package", "bundle.tar.gz", archive(root), "application/gzip"),
        "report": story.save("package", "report.html", b"<h1>report</h1>", "text/html"),
    }
    from onboarding.stages.package.result import PackageResult

    result = PackageResult(
        **refs, bundle_name=root.name, kernels=[], public_key=key, manifest_sha256="0" * 64, summary="bundle signed"
    )
    story.end("package", result)
    return root


def test_submit_prints_the_id_alone(served: Any, run: Run) -> None:
    code, out, err = run("submit", "llama-3.1-8b", "--profile", "quick")
    assert code == 0
    job = out.strip()
    assert len(job) == 26
    assert f"onboard watch {job}" in err
    listed = json.loads(run("jobs", "--json")[1])["jobs"]
    assert [(item["id"], item["profile"]) for item in listed] == [(job, "quick")]
    assert "llama-3.1-8b" in run("jobs")[1]


def test_submit_takes_files_and_folders(served: Any, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = (example_path("llama-3.1-8b") / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)  # weights stay here
    for what in (folder, folder / "config.json"):
        assert run("submit", str(what))[0] == 0
    names = [item["name"] for item in json.loads(run("jobs", "--json")[1])["jobs"]]
    assert names == ["my-model", "my-model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "no-such-model"], "no-such-model"),
        (["submit", "./missing/config.json"], "does not exist"),
        (["submit", "llama-3.1-8b", "--profile", "huge"], "profile"),
        (["watch", "nope"], "no such job"),
        (["cancel", "last"], "no jobs yet"),
        (["bundle", "verify", "."], "not a complete bundle"),
    ],
)
def test_refusals_are_said_not_thrown(served: Any, run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code == 1
    assert err.startswith("error  ")
    assert words in err
    assert "Traceback" not in out + err


def test_no_service(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBOARD_PORT", str(free_port()))
    monkeypatch.setenv("ONBOARD_API_KEY", "onb_x")
    code, _, err = run("jobs")
    assert code == 4
    assert "onboard serve" in err


def test_no_key_yet(home: Path, run: Run) -> None:
    code, _, err = run("jobs")
    assert code == 1
    assert "no API key" in err


def test_wrong_use(run: Run) -> None:
    assert run("submit")[0] == 2
    assert run("no-such-command")[0] == 2


def test_a_crash_goes_to_a_log(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "connect", lambda: 1 / 0)
    code, _, err = run("jobs")
    assert code == 1
    log = home / "logs" / "cli.log"
    assert str(log) in err
    assert "Traceback" not in err
    assert "ZeroDivisionError" in log.read_text()


def test_watch_without_a_terminal_prints_lines(served: Callable[..., Story], run: Run) -> None:
    story = served()
    teller = threading.Timer(0.5, story.tell)
    teller.start()
    code, out, _ = run("watch", story.id)
    teller.join()
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    ended = [(line[0], line[1]) for line in lines if line[1] != "running"]
    assert ended == [(s, "skipped" if s == "tune" else "ok") for s in
                     ("intake", "parse", "gaps", "generate", "judge", "tune", "align", "throughput", "scale",
                      "package")]  # fmt: skip
    assert "\x1b" not in out


def test_watch_a_failure(served: Callable[..., Story], run: Run) -> None:
    story = served()
    story.begin("intake")
    story.fail("intake", {"type": "t/x", "title": "config.json has no layers", "detail": "add it", "stage": "intake"})
    code, _, err = run("watch", "last")
    assert code == 1
    assert "config.json has no layers" in err
    assert f"onboard retry {story.id}" in err
    assert "?stage=intake" in err
    code, out, _ = run("retry", story.id)
    assert (code, out) == (0, f"{story.id} goes on\n")


def test_cancel(served: Callable[..., Story], run: Run) -> None:
    story = served()
    assert run("cancel", story.id)[1] == f"{story.id} is cancelled\n"


def test_bundle_and_report(served: Callable[..., Story], run: Run, tmp_path: Path) -> None:
    source = bundled(served(), tmp_path / "made")
    to = tmp_path / "bundles"
    code, out, _ = run("bundle", "pull", "last", "--to", str(to))
    assert (code, Path(out.strip())) == (0, to / source.name)
    assert (to / source.name / "kernels" / "k.py").read_text() == "x = 1\n"
    assert list(to.iterdir()) == [to / source.name]
    assert "is what was signed" in run("bundle", "verify", str(to / source.name))[1]
    assert run("bundle", "pull", "last", "--to", str(to))[0] == 0  # the same again is no change
    (to / source.name / "MANIFEST.sha256").write_text("mine\n")
    assert run("bundle", "verify", str(to / source.name))[0] == 1
    assert run("bundle", "pull", "last", "--to", str(to))[0] == 1  # nothing of the user's is overwritten
    assert run("bundle", "pull", "last", "--to", str(to), "--replace")[0] == 0
    assert run("bundle", "verify", str(to / source.name))[0] == 0
    report = tmp_path / "r.html"
    assert run("report", "last", "-o", str(report))[0] == 0
    assert report.read_text() == "<h1>report</h1>"


def test_no_bundle_yet(served: Callable[..., Story], run: Run, tmp_path: Path) -> None:
    served()
    code, _, err = run("bundle", "pull", "last", "--to", str(tmp_path / "b"))
    assert code == 1
    assert "no package result" in err


def test_signin(served: Any, run: Run) -> None:
    code, out, _ = run("signin", "/jobs/x")
    assert code == 0
    assert "/signin?token=" in out
    assert out.strip().endswith("&to=/jobs/x")


def job_like(**stage: Any) -> dict[str, Any]:
    """The parts of a job that the table reads."""
    common = {"per_operator": False, "total": 1, "done": 0, "label": "", "problem": None, "verb": "v", "attempt": 1}
    return {"stages": [{"stage": "judge", "state": "running", "fraction": None, "summary": "", **common, **stage}]}


def rendered(thing: Any) -> str:
    """As a wide terminal shows it."""
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


def test_the_table_shows_bar_count_item_elapsed_and_estimate() -> None:
    job = job_like(elapsed_s=30.0, fraction=0.25, per_operator=True, total=4, done=1, label=f"grad q {HOSTILE}")
    text = rendered(live.table(job, since=2.0))
    for word in ("judge", "running", "32.0 s", "1/4", f"grad q {HOSTILE}", "about 90 s left"):
        assert word in text
    assert "━" in text or "-" in text


@pytest.mark.parametrize(("fraction", "elapsed"), [(0.01, 30.0), (1.0, 30.0), (0.5, 1.0), (None, 30.0)])
def test_no_estimate_without_grounds(fraction: float | None, elapsed: float) -> None:
    assert live.remaining({"fraction": fraction, "elapsed_s": elapsed}) == ""


def test_markup_in_names_is_not_markup() -> None:
    text = rendered(tables.jobs_table([{"id": "1", "name": "[red]x[/red]", "state": "running", "profile": "quick",
                                        "elapsed_s": 1.0, "created_at": "2026-01-01T00:00:00Z"}]))  # fmt: skip
    assert "[red]x[/red]" in text


def test_parse_view() -> None:
    outcome = {
        "parse": {"architecture": architecture().model_dump()},
        "gaps": gaps_result().model_dump(),
        "reasons": ["gaps: no roofline for this device"],
    }
    text = rendered(tables.parse_view(outcome))
    for word in ("KKKM".replace("", "  ").strip()[:4], "49.1 B", "3 B active", "KDA", "20 %", "untied", "partial"):
        assert word.strip() in text


def test_ensure_running_says_why_it_cannot_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from api.cli.client import Client
    from onboarding.problem import Problem

    monkeypatch.setenv("ONBOARD_PORT", str(free_port()))
    monkeypatch.setattr(service.sys, "executable", "/bin/false")  # type: ignore[attr-defined]
    settings = Settings()
    with Client(settings) as client, pytest.raises(Problem) as refused:
        service.ensure_running(client, settings)
    assert str(home / "logs" / "serve.log") in refused.value.detail


def test_stop_without_a_service(home: Path, run: Run) -> None:
    code, out, _ = run("stop")
    assert code == 0
    assert "no service runs" in out


def test_it_starts_fast() -> None:
    """0.4 s; measured as processor time, best of five, because other work may be sharing the cores."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "api.cli.main", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.4


def test_a_step_that_waits_is_approved_from_the_command_line(served: Any, run: Run) -> None:
    code, out, _ = run("submit", "llama-3.1-8b", "--policy", "rules", "--approve", "generate")
    assert code == 0
    job = out.strip()
    code, out, err = run("agent", "show", job)
    assert code == 0
    assert "nothing waits for you" in out + err
    code, _, err = run("agent", "approve", job, "generate")
    assert code == 1
    assert "no generate step waits" in err
