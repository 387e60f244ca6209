"""A fine-tuning worker as it runs: its JSON lines become a live row on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.cli import output
from api.dashboard.formats import duration
from onboarding.problem import Problem
from runtime.voice import LINES

SPARK = "▁▂▃▄▅▆▇█"
WARNINGS = ("alert", "skipped", "checkpoint-failed", "checkpoint-corrupt", "upload-failed")


class Run:
    """One worker process and what it has said so far."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "finetune.log"
        self.steps: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.stopped: dict[str, Any] | None = None
        self.problem: dict[str, Any] | None = None
        self._begun = time.monotonic()

    def follow(self, options: dict[str, Any]) -> int:
        """Start the worker, show what it says, and give its exit status. Ctrl-C and SIGTERM let it save first."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as aside, self.log.open("a") as log:
            path = Path(aside) / "options.json"
            path.write_text(json.dumps(options))
            command = [sys.executable, "-P", "-m", "onboarding.finetune", str(path)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
            before = {s: signal.signal(s, lambda *_: child.terminate()) for s in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._show(child)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
            return child.wait()

    def crashed(self, status: int) -> Problem:
        """A worker that ended without an answer."""
        lines = self.log.read_text().strip().splitlines()
        last = next((line for line in reversed(lines) if line and not line.startswith((" ", "-", "="))), "")
        return Problem("run-failed", f"the run failed: {last or f'exit status {status}'}", f"all it said: {self.log}")

    def _show(self, child: subprocess.Popen[str]) -> None:
        console = output.console()
        if not console.is_terminal:
            for event in self._events(child):
                if event["kind"] != "step" or event["step"] in (1, event["steps"]) or event["step"] % 10 == 0:
                    for line in lines(event):
                        output.say(line)
            return
        with Live(get_renderable=self._picture, console=console, refresh_per_second=5) as live:
            for event in self._events(child):
                if event["kind"] not in ("step", "checkpoint"):
                    for line in lines(event):
                        live.console.print(Text(line, style="yellow" if event["kind"] in WARNINGS else ""))

    def _events(self, child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        assert child.stdout is not None
        for line in child.stdout:
            if not line.startswith("{"):
                continue  # a library that prints
            event: dict[str, Any] = json.loads(line)
            if event["kind"] == "step":
                self.steps.append(event)
            elif event["kind"] == "result":
                self.result = event
            elif event["kind"] == "stopped":
                self.stopped = event
            elif event["kind"] == "problem":
                self.problem = {"kind": event["problem"], "title": event["title"], "detail": event["detail"]}
                continue
            yield event

    def _picture(self) -> Group:
        """The running step: bar, numbers, curve, time left."""
        if not self.steps or self.result is not None:
            waited = duration(time.monotonic() - self._begun)
            return Group(Text(f"  starting   {waited}", style="dim") if not self.steps else Text(""))
        last = self.steps[-1]
        done, total = last["step"], last["steps"]
        seconds = sum(s["seconds"] for s in self.steps) / len(self.steps)
        grid = Table.grid(padding=(0, 1))
        mfu = f"MFU {last['mfu']:.1%}" if "mfu" in last else ""
        grid.add_row(
            Text("  train", style="cyan"),
            ProgressBar(total=total, completed=done, width=24, pulse=False),
            Text(f"{done}/{total}"),
            Text(f"loss {last['loss']:.4f}", style="bold"),
            Text(sparkline([s["loss"] for s in self.steps])),
            Text(f"{last['tokens_per_second']:.0f} tokens/s {mfu}".rstrip()),
            Text(f"about {duration(seconds * (total - done))} left", style="dim"),
        )
        return Group(grid)


def lines(event: dict[str, Any]) -> list[str]:
    """An event as lines of text."""
    if event["kind"] == "budget":
        return [f"  {line}" for line in event["lines"]]
    if event["kind"] == "step":
        return [
            f"  step {event['step']}/{event['steps']}  loss {event['loss']:.4f}  norm {event['grad_norm']:.3f}  "
            f"{event['tokens_per_second']:.0f} tokens/s"
        ]
    if event["kind"] == "preparing":
        return [f"  {event['words']}"]
    if event["kind"] in LINES and event["kind"] not in ("result", "stopped"):
        return [f"  {LINES[event['kind']].format(**event)}"]
    return []


def sparkline(values: list[float], width: int = 24) -> str:
    """The newest values as a row of blocks."""
    shown = [v for v in values[-width:] if v == v]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((v - low) * scale)] for v in shown)


def conclude(run: Run) -> None:
    """What came out, and how to use it."""
    result = run.result
    assert result is not None
    folder = Path(result["path"])
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    output.say("")
    kind = "adapter" if folder.name == "adapter" else "model"
    output.say(f"{kind:<9}{folder}  ({size / 1e6:.1f} MB)")
    output.say(f"loss     {result['first']:.4f} -> {result['last']:.4f} over {result['steps']} steps")
    output.say(f"time     {duration(result['seconds'])}, metrics in {run.log.parent / 'metrics.jsonl'}")
    if kind == "adapter":
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        output.say(
            f"use      PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {str(folder)!r})"
        )
    else:
        output.say(f"use      AutoModelForCausalLM.from_pretrained({str(folder)!r})")
