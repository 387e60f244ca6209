"""What a run says while it goes: one JSON object a line for a program, or plain lines for a person."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, TextIO

LINES = {
    "checked": "model    {parameters} parameters, {trained} trained · {records} records · {ranks} ranks on {device}",
    "kernels": "kernels  {swapped} modules run on the bundle's kernels{notes}",
    "isolated": "packing  documents run apart in {classes}",
    "resumed": "resumed  from step {step} ({path})",
    "checkpoint": "saved    step {step} -> {path}",
    "checkpoint-failed": "WARNING  the checkpoint of step {step} was not written: {why}; the ones before it are intact",
    "checkpoint-corrupt": "WARNING  the checkpoint of step {step} is damaged and left alone: {why}",
    "upload": "upload   step {step} -> {path}",
    "upload-failed": "WARNING  step {step} was not uploaded: {why}",
    "download": "fetched  step {step} from {path}",
    "alert": "ALERT    step {step}: {words}",
    "skipped": "WARNING  step {step} moved nothing: {why}",
    "memory": "memory   {words}",
    "profile": "profile  step {step}: {words}",
    "stopped": "stopped  after step {step} by {why}; the run is saved and goes on when started again",
    "result": "done     {steps} steps, loss {first:.4f} -> {last:.4f} in {seconds:.0f} s -> {path}",
    "problem": "error    {title}\n         {detail}",
}


class Voice:
    """Only the first rank speaks.

    Args:
        first: whether this rank is it.
        events: JSON lines instead of text.
        stream: where to.
    """

    def __init__(self, *, first: bool, events: bool, stream: TextIO | None = None) -> None:
        self.first, self.events, self.stream = first, events, stream
        self._lock = threading.Lock()

    def say(self, kind: str, **data: Any) -> None:
        """Say one thing."""
        if not self.first:
            return
        stream = self.stream or sys.stdout
        text = json.dumps({"kind": kind, **data}) if self.events else self._text(kind, data)
        with self._lock:
            print(text, file=stream, flush=True)

    def report(self, data: dict[str, Any]) -> None:
        """Say what a part of the runtime reports as one mapping."""
        self.say(**data)

    def _text(self, kind: str, data: dict[str, Any]) -> str:
        if kind == "budget":
            return "\n".join(data["lines"])
        if kind == "step":
            mfu = f"  MFU {data['mfu']:.1%}" if "mfu" in data else ""
            return (
                f"step {data['step']:>6}/{data['steps']}  loss {data['loss']:.4f}  norm {data['grad_norm']:.3f}  "
                f"lr {data['lr']:.2e}  {data['tokens_per_second']:.0f} tokens/s{mfu}"
            )
        return LINES[kind].format(**data)
