"""Several ranks on gloo under torchrun: what kills, hangs or stops them, and how the run comes back.

Marked slow: every case starts processes that import torch.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from runtime_models import definition, text_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0


def write_run(folder: Path, name: str = "qwen3-moe", **changes: Any) -> Path:
    definition(folder / "definition", name)
    config: dict[str, Any] = {
        "output": str(folder / "run"),
        "steps": 12,
        "device": "cpu",
        "model": {"definition": str(folder / "definition"), "dtype": "float64"},
        "data": {
            "files": [str(text_file(folder / "data.jsonl"))],
            "tokenizer": "bytes",
            "sequence_length": 32,
        },
        "step": {"batch": 4},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": 1, "keep": 3},
        "guard": {"heartbeat_s": 0.2},
        "telemetry": {"tensorboard": False},
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Launch:
    """One torchrun, and what its first rank says."""

    def __init__(self, config: Path, ranks: int, *, restarts: int = 0) -> None:
        options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "runtime.train", str(config)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": ""}
        self.log = config.parent / "errors.log"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--events"], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )
        self.events: list[dict[str, Any]] = []

    def until(self, kind: str, step: int = 0) -> dict[str, Any]:
        """Read until an event comes; its time of arrival is noted in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                event = {**json.loads(line), "at": time.monotonic()}
                self.events.append(event)
                if event["kind"] == kind and event.get("step", 0) >= step:
                    return event
        raise AssertionError(f"no {kind} came; errors: {self.log.read_text()[-3000:]}")

    def end(self) -> int:
        """Read the rest; gives torchrun's exit status."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.events.append({**json.loads(line), "at": time.monotonic()})
        return self.process.wait(PATIENCE_S)

    def losses(self) -> dict[int, float]:
        return {e["step"]: e["loss"] for e in self.events if e["kind"] == "step"}

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, by its heartbeat."""
        config = yaml.safe_load((self.log.parent / "run.yaml").read_text())
        beat = json.loads((Path(config["output"]) / "heartbeats" / f"rank-{number}.json").read_text())
        return psutil.Process(beat["pid"])


@pytest.fixture
def launched() -> Iterator[list[Launch]]:
    """Everything started is ended, whatever the test does."""
    all_: list[Launch] = []
    yield all_
    for launch in all_:
        if launch.process.poll() is None:
            for child in psutil.Process(launch.process.pid).children(recursive=True):
                child.kill()
            launch.process.kill()
        launch.process.wait()
        assert launch.process.stdout is not None
        launch.process.stdout.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same run on one rank, uninterrupted."""
    config = write_run(tmp_path_factory.mktemp("unbroken"))
    command = [sys.executable, "-m", "runtime.train", str(config), "--events"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}


def report(fault: str, detected: float, resumed: float) -> None:
    """One row of the table in docs/runtime.md."""
    print(f"| {fault} | {detected:.1f} s | {resumed:.1f} s |")


def test_a_killed_rank_is_replaced_and_nothing_is_lost(
    tmp_path: Path, launched: list[Launch], unbroken: dict[int, float]
) -> None:
    run = Launch(write_run(tmp_path, parallel={"ep": 2}), 2, restarts=1)
    launched.append(run)
    run.until("checkpoint", 4)
    begun = time.monotonic()
    run.rank(1).send_signal(signal.SIGKILL)
    resumed = run.until("resumed")
    checked = next(e for e in reversed(run.events) if e["kind"] == "checked")
    assert run.end() == 0
    assert resumed["step"] >= 4
    assert run.losses() == pytest.approx(unbroken, rel=1e-9)
    report("SIGKILL of a rank", checked["at"] - begun, resumed["at"] - begun)


def test_a_stopped_rank_is_noticed_by_the_others_and_replaced(
    tmp_path: Path, launched: list[Launch], unbroken: dict[int, float]
) -> None:
    config = write_run(tmp_path, guard={"heartbeat_s": 0.2, "hang_s": 40.0})
    run = Launch(config, 2, restarts=1)
    launched.append(run)
    run.until("checkpoint", 4)
    begun = time.monotonic()
    stopped = run.rank(1)
    stopped.send_signal(signal.SIGSTOP)
    resumed = run.until("resumed")
    assert run.end() == 0
    assert run.losses() == pytest.approx(unbroken, rel=1e-9)
    stacks = (tmp_path / "run" / "heartbeats" / "rank-0.stacks.txt").read_text()
    assert "no progress for" in stacks
    assert "step.py" in stacks  # where it waited for the other rank
    report("SIGSTOP of a rank (hang_s 40)", 40.0, resumed["at"] - begun)


def test_a_slow_rank_is_told_by_an_alert_and_nothing_is_lost(
    tmp_path: Path, launched: list[Launch], unbroken: dict[int, float]
) -> None:
    """Ten usual steps without one rank: all wait for it, the run says so and goes on."""
    alerts = {"alerts": [{"rule": "throughput-drop", "limit": 0.7}], "tensorboard": False}
    run = Launch(write_run(tmp_path, parallel={"ep": 2}, telemetry=alerts), 2)
    launched.append(run)
    run.until("step", 5)
    usual = statistics.median(e["seconds"] for e in run.events if e["kind"] == "step" and e["step"] > 1)
    begun = time.monotonic()
    slow = run.rank(1)
    slow.send_signal(signal.SIGSTOP)
    time.sleep(max(3.0, 10 * usual))
    slow.send_signal(signal.SIGCONT)
    going_on = time.monotonic()
    alert = run.until("alert")
    assert "below the median" in alert["words"]
    assert run.end() == 0
    assert run.losses() == pytest.approx(unbroken, rel=1e-9)
    report("slow rank", alert["at"] - begun, going_on - begun)


def test_a_run_goes_on_with_another_number_of_ranks(
    tmp_path: Path, launched: list[Launch], unbroken: dict[int, float]
) -> None:
    """Two ranks with EP 2, then one: weights, optimizer, balance and data place are resharded."""
    config = write_run(tmp_path, parallel={"ep": 2})
    first = Launch(config, 2)
    launched.append(first)
    first.until("step", 5)
    first.rank(0).send_signal(signal.SIGTERM)
    assert first.end() == 0
    stopped = next(e for e in first.events if e["kind"] == "stopped")
    second = Launch(write_run(tmp_path), 1)
    launched.append(second)
    assert second.end() == 0
    assert next(e for e in second.events if e["kind"] == "resumed")["step"] == stopped["step"]
    assert {**first.losses(), **second.losses()} == pytest.approx(unbroken, rel=1e-9)


def test_one_ranks_bad_gradient_is_seen_by_all(tmp_path: Path, launched: list[Launch]) -> None:
    """A weight that is NaN on one rank only: the shared norm is not finite, so no rank moves."""
    code = tmp_path / "poison.py"
    code.write_text(
        "import os, sys, torch\n"
        "from runtime import step\n"
        "own = step.Stepper._pass\n"
        "def bad(self, rows, counted):\n"
        "    out = own(self, rows, counted)\n"
        "    self.passes = getattr(self, 'passes', 0) + 1\n"
        "    if self.meshes.rank == 1 and self.passes == 4:\n"
        "        next(p for p in self.model.parameters() if p.grad is not None).grad.mul_(float('nan'))\n"
        "    return out\n"
        "step.Stepper._pass = bad\n"
        "from runtime.train import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    config = write_run(tmp_path, steps=4)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(code)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(config), "--events"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [e["step"] for e in events if e["kind"] == "skipped"] == [2]
    assert [e["step"] for e in events if e["kind"] == "alert"] == [2]
    assert events[-1]["kind"] == "result"
