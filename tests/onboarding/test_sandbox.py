"""The sandbox holds, by every backend that works here, as root and as an ordinary user; its limits are limits."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from onboarding.problem import Problem
from onboarding.sandbox import Limits, Sandbox, backends, escapes, module_command, seccomp, works
from onboarding.sandbox.view import build_view

pytestmark = pytest.mark.sandbox
WORKING = [backend.name for backend in backends.ORDER if not works(backend)]
FAST = ("bubblewrap",)
"""The others in the slow tests; the warm parent's tests try namespaces quickly."""


@pytest.fixture(params=[pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in WORKING])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(backend=request.param)


def python(sandbox: Sandbox, code: str, scratch: Path, **options: object):  # type: ignore[no-untyped-def]
    return sandbox.run([sys.executable, "-I", "-S", "-c", code], scratch=scratch, **options)  # type: ignore[arg-type]


def test_some_sandbox_works_here() -> None:
    assert WORKING


@pytest.mark.parametrize("escape", escapes.ESCAPES, ids=lambda e: e.name)
def test_escapes_fail(sandbox: Sandbox, escape: escapes.Escape) -> None:
    assert escapes.attempt(sandbox, escape) == ""


def test_the_attempts_would_succeed_without_a_sandbox() -> None:
    """An attempt that fails everywhere would prove nothing."""
    unsafe = Sandbox(backend="no such backend", unsafe=True)
    assert unsafe.backend is backends.NONE
    for escape in escapes.ESCAPES:
        if escape.name in ("read the host", "connect", "look at the judge", "harm other processes"):
            assert escapes.attempt(unsafe, escape) != "", escape.name


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/bin/python3").exists(),
    reason="needs root and a system Python to become an ordinary user",
)
def test_escapes_fail_for_an_ordinary_user(tmp_path: Path) -> None:
    import subprocess

    import psutil

    root = Path(__file__).resolve().parents[2]
    packages = tmp_path.parent.parent / f"packages-{os.getpid()}"
    shutil.copytree(Path(psutil.__file__).parent, packages / "psutil", ignore=shutil.ignore_patterns("tests"))
    for package in ("onboarding", "kernel_templates", "runtime"):
        shutil.copytree(root / package, packages / package)
    for folder in (packages, *packages.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    code = """
from onboarding.sandbox import Sandbox, backends, escapes, works
for backend in backends.ORDER:
    if not works(backend):
        for escape in escapes.ESCAPES:
            print(backend.name, escape.name, escapes.attempt(Sandbox(backend=backend.name), escape) or "held")
"""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-B", "-c", code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PYTHONPATH": str(packages), "PATH": os.environ["PATH"]}
        )
    finally:
        shutil.rmtree(packages)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    assert [line for line in lines if not line.endswith(" held")] == []


def test_outcomes_say_why(sandbox: Sandbox, tmp_path: Path) -> None:
    expected = {
        "print('fine')": "",
        "raise SystemExit(3)": "exit 3",
        "import os; os.kill(os.getpid(), 11)": "signal SIGSEGV",
        "import ctypes; ctypes.string_at(0)": "signal SIGSEGV",
        "while True: pass": "time",
    }
    for code, reason in expected.items():
        if "os.kill" in code and sandbox.backend is backends.LANDLOCK:
            continue  # no signals at all where other processes are in sight
        assert python(sandbox, code, tmp_path, limits=Limits(wall_s=1.0)).reason == reason, code


def test_scratch_is_the_only_writable_place_and_files_come_back(sandbox: Sandbox, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "input").write_text("42")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = f"open('answer', 'w').write(open({str(data / 'input')!r}).read()); open({str(data / 'input')!r}, 'a')"
    outcome = python(sandbox, code, scratch, read_only=[data])
    assert "Read-only file system" in outcome.stderr_tail or "Permission denied" in outcome.stderr_tail
    assert (scratch / "answer").read_text() == "42"
    assert (data / "input").read_text() == "42"


def test_the_environment_is_cleared(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = python(sandbox, "import os; print(sorted(os.environ.values()))", tmp_path, env={"GIVEN": "given"})
    assert "hunter2" not in outcome.stdout_tail
    assert "given" in outcome.stdout_tail


def test_lines_arrive_and_output_is_capped(sandbox: Sandbox, tmp_path: Path) -> None:
    lines: list[str] = []
    python(sandbox, "print('one'); print('two')", tmp_path, on_line=lines.append)
    assert lines == ["one", "two"]
    outcome = python(sandbox, "print('x' * 10**7)", tmp_path, limits=Limits(output_bytes=10**5))
    assert outcome.reason == "output"
    assert len(outcome.stdout_tail) <= 16 * 1024


def test_modules_run_with_this_interpreter(sandbox: Sandbox, tmp_path: Path) -> None:
    outcome = sandbox.run_module("kernel_templates.registry", scratch=tmp_path)
    assert outcome.ok, outcome.stderr_tail


def test_descriptors_are_inherited(sandbox: Sandbox, tmp_path: Path) -> None:
    read, write = os.pipe()
    running = sandbox.start(
        [sys.executable, "-I", "-S", "-c", f"import os; print(os.read({read}, 9).decode())"],
        scratch=tmp_path,
        fds=[read],
    )
    os.close(read)
    os.write(write, b"job")
    os.close(write)
    assert running.wait().stdout_tail == "job\n"


@pytest.mark.slow  # a time: meaningful on a quiet machine only
def test_launch_is_quick(tmp_path: Path) -> None:
    """Best of ten: the sandbox adds at most 30 ms to a plain start, which takes 20 ms on an idle machine."""
    best = {}
    for name in ("no such backend", ""):
        sandbox = Sandbox(backend=name, unsafe=True)
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            python(sandbox, "pass", tmp_path)
            times.append(time.perf_counter() - begin)
        best[name] = min(times)
    allowance = 0.030 if WORKING[0] == "bubblewrap" else 0.080
    busy = max(1.0, best["no such backend"] / 0.020)
    assert best[""] - best["no such backend"] < allowance * busy


def test_no_backend_is_a_refusal() -> None:
    with pytest.raises(Problem, match="no sandbox works"):
        Sandbox(backend="no such backend")


def test_the_view_shows_prefixes_through_every_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "versions" / "3.11.7"
    (real / "bin").mkdir(parents=True)
    (real / "bin" / "python3").touch()
    link = tmp_path / "versions" / "3.11"
    link.symlink_to(real)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(link / "bin" / "python3")
    monkeypatch.setattr(sys, "executable", str(venv / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.setattr(sys, "base_prefix", str(link))
    view = build_view(tmp_path, [], gpu=False)
    assert {str(venv), str(link), str(real)} <= {inside for _, inside in view.read_only}
    assert {inside: host for host, inside in view.read_only}[str(link)] == str(real)


def test_filter_programs_are_well_formed() -> None:
    for machine in ("x86_64", "aarch64"):
        for namespaces in (True, False):
            code = seccomp.program(namespaces=namespaces, machine=machine)
            count = len(code) // 8
            assert len(code) % 8 == 0
            assert count < 4096  # BPF_MAXINSNS
            for i in range(count):
                operation, yes, no = int.from_bytes(code[8 * i : 8 * i + 2], "little"), code[8 * i + 2], code[8 * i + 3]
                if operation & 7 == 5:
                    assert i + 1 + max(yes, no) < count


def test_packages_of_the_users_own_path_are_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    packages.chmod(0o755)
    (packages / "onlyhere.py").write_text("WORD = 'found'\n")
    monkeypatch.setenv("PYTHONPATH", f"{packages}:relative")
    argv, env = module_command("onlyhere", [])
    assert env["PYTHONPATH"].split(":")[1:] == [
        str(packages)
    ]  # ours first, and no place relative to the scratch folder
    (tmp_path / "scratch").mkdir()
    outcome = Sandbox().run(
        [argv[0], "-P", "-c", "import onlyhere; print(onlyhere.WORD)"], scratch=tmp_path / "scratch", env=env
    )
    assert outcome.stdout_tail.strip() == "found", outcome.stderr_tail
