"""Heartbeats, hangs and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.guard.signals import StopWish
from runtime.guard.watchdog import HUNG, Watchdog

ROOT = Path(__file__).parents[2]
HANGING = """
import sys, threading
from pathlib import Path
from runtime.guard.watchdog import Watchdog
with Watchdog(Path(sys.argv[1]), 3, hang_s=0.4, heartbeat_s=0.1) as dog:
    dog.progress(5, "training")
    threading.Event().wait()
"""


def test_a_hang_ends_the_process_with_every_stack_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANGING, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == HUNG
    stacks = (tmp_path / "rank-3.stacks.txt").read_text()
    for text in (stacks, done.stderr):
        assert "at step 5 (training)" in text
        assert 'File "<string>", line 7' in text
    assert json.loads((tmp_path / "rank-3.json").read_text())["step"] == 5


def test_the_last_heartbeat_says_how_it_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Watchdog(tmp_path, 0, hang_s=0, heartbeat_s=10):
        raise KeyError
    beat = json.loads((tmp_path / "rank-0.json").read_text())
    assert beat["doing"] == "ended by KeyError"
    assert beat["pid"] == os.getpid()


def test_a_heartbeat_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "gone", 0, hang_s=0, heartbeat_s=10) as dog:
        (tmp_path / "gone").rmdir()
        dog.progress(1, "training")


def test_the_first_signal_is_a_wish_and_the_second_acts_as_before() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopWish() as wish:
            assert wish.wished is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert wish.wished == "SIGTERM"
            assert seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
