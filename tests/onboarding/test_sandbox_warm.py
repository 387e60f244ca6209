"""Programs forked from the warm parent: as confined as any other, single use, blind to the parent and to each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onboarding.sandbox import Limits, Running, Sandbox, backends, escapes, warm, works

pytestmark = pytest.mark.sandbox
BACKENDS = [b.name for b in backends.WARM_ORDER if b is not backends.BUBBLEWRAP and not works(b)]


@pytest.fixture(scope="module")
def parent() -> Iterator[warm.WarmParent]:
    own = warm.WarmParent(["torch"])
    kept, warm._shared = warm._shared, own
    yield own
    warm._shared = kept
    own.close()


@pytest.fixture(params=[pytest.param(n, marks=[] if n == "namespaces" else [pytest.mark.slow]) for n in BACKENDS])
def sandbox(request: pytest.FixtureRequest, parent: warm.WarmParent) -> Sandbox:
    return Sandbox(backend=request.param)


@pytest.mark.parametrize("escape", [*escapes.ESCAPES, *escapes.FORKED_ESCAPES], ids=lambda e: e.name)
def test_escapes_fail(sandbox: Sandbox, parent: warm.WarmParent, escape: escapes.Escape) -> None:
    for _ in range(2 if escape.name == "what others left" else 1):
        assert escapes.attempt(sandbox, escape, parent) == ""


def test_a_fork_has_imported_already_and_runs_as_python_m_would(parent: warm.WarmParent, tmp_path: Path) -> None:
    sandbox = Sandbox()
    assert sandbox.backend is not backends.BUBBLEWRAP
    outcome = start(
        sandbox, "import sys; print(sys.argv[0], sys.modules.keys() >= {'torch', 'timeit'})", tmp_path
    ).wait()
    assert outcome.stdout_tail.startswith("timeit True\n")
    outcome = sandbox.run_module("onboarding.no_such_module", scratch=tmp_path)
    assert outcome.reason == "exit 1"
    assert "ModuleNotFoundError" in outcome.stderr_tail


@pytest.mark.slow  # a time: meaningful on a quiet machine only
def test_a_fork_is_quick(parent: warm.WarmParent, tmp_path: Path) -> None:
    """Best of ten: at most 50 ms to a program's first line and back, its end included."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        start(Sandbox(), "pass", tmp_path).wait()
        times.append(time.perf_counter() - begin)
    cold = Sandbox().run([sys.executable, "-c", "pass"], scratch=tmp_path).wall_s
    assert min(times) < 0.050 * max(1.0, cold / 0.050)


def start(sandbox: Sandbox, code: str, scratch: Path, wall_s: float = 20.0) -> Running:
    """Fork a program that runs ``code``: the standard library's ``timeit`` runs its argument once."""
    return sandbox.start_module("timeit", ["-n1", "-r1", code], scratch=scratch, limits=Limits(wall_s=wall_s))


def test_siblings_see_their_own_folder_only(sandbox: Sandbox, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    code = """
import os, time
open("own", "w").close()
while not os.path.exists("go"): time.sleep(0.01)
for look in (lambda: os.listdir({other!r}), lambda: open({other!r} + "/own"), lambda: open({other!r} + "/new", "w")):
    try: print("SEEN", look())
    except OSError: print("apart")
"""
    running = [
        start(sandbox, code.format(other=str(other)), folder)
        for folder, other in zip(folders, reversed(folders), strict=True)
    ]
    for folder in folders:
        (folder / "go").touch()
    for program in running:
        outcome = program.wait()
        assert outcome.ok, outcome
        assert "SEEN" not in outcome.stdout_tail
        assert outcome.stdout_tail.count("apart") == 3


def test_everything_ends_with_the_one_who_asked(sandbox: Sandbox, parent: warm.WarmParent, tmp_path: Path) -> None:
    """A judge that is killed cannot end its programs: they notice."""
    before = set(psutil.Process(parent.pid).children(recursive=True))
    pid = os.fork()
    if pid == 0:
        start(sandbox, "import os, time; os.fork(); os.setsid(); time.sleep(60)", tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 60
    while set(psutil.Process(parent.pid).children(recursive=True)) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert escapes.left_over(parent.mark, parent.pid) == []


def test_without_the_parent_programs_start_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = warm.WarmParent([])
    monkeypatch.setattr(warm, "_shared", own)
    sandbox = Sandbox()
    running = start(sandbox, "import time; time.sleep(0.3)", tmp_path)
    os.kill(own.pid, signal.SIGKILL)
    assert running.wait().ok  # a program does not die with the parent
    assert start(sandbox, "pass", tmp_path).wait().ok
    assert warm.shared() is None


def test_the_parent_starts_from_a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONBOARD_SECRET", "canary")
    own = warm.WarmParent([])
    try:
        assert "canary" not in Path(f"/proc/{own.pid}/environ").read_text()
        monkeypatch.setattr(warm, "_shared", own)
        outcome = start(Sandbox(), "import os; print(open('/proc/self/environ').read(), os.environ)", tmp_path).wait()
        assert "PYTHONPATH" in outcome.stdout_tail
        assert "canary" not in outcome.stdout_tail
    finally:
        own.close()


def test_the_parent_ends_with_its_starter(tmp_path: Path) -> None:
    code = """
import os, sys
from onboarding.sandbox import warm
warm.prestart()
print(warm.shared().pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
