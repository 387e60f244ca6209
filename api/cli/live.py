"""A job as it runs: a table that lives on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from api.cli.client import Client, Unreachable
from api.dashboard.formats import STATE_WORDS, duration
from onboarding.pipeline import FINAL_JOB_STATES

POLL_S = 0.4
PATIENCE_S = 60.0
"""How long the service may be away (a restart) before watching gives up."""
STYLES = {
    "ok": "green",
    "running": "cyan",
    "failed": "bold red",
    "cancelled": "magenta",
    "skipped": "dim",
    "waiting": "dim",
    "queued": "dim",
}


def remaining(stage: dict[str, Any]) -> str:
    """An estimate from what is done, once there is something to judge by."""
    fraction, elapsed = stage["fraction"], stage["elapsed_s"]
    if not fraction or not elapsed or fraction < 0.05 or fraction >= 1 or elapsed < 2:
        return ""
    left = elapsed * (1 - fraction) / fraction
    return f"about {left:.0f} s left" if left < 100 else f"about {duration(left)} left"


def note(stage: dict[str, Any]) -> str:
    """What there is to say about a stage that does not run."""
    if stage["problem"]:
        return str(stage["problem"].get("title", ""))
    return str(stage["summary"] or ("" if stage["state"] != "waiting" else stage["verb"]))


def running_note(stage: dict[str, Any]) -> Table:
    """Bar, count, item and estimate of a running stage."""
    grid = Table.grid(padding=(0, 1))
    cells: list[Any] = []
    if stage["fraction"] is not None:
        cells.append(ProgressBar(total=1.0, completed=stage["fraction"], width=20, pulse=False))
    if stage["per_operator"] and stage["total"]:
        cells.append(Text(f"{stage['done']}/{stage['total']}"))
    cells += [Text(stage["label"]), Text(remaining(stage), style="dim")]
    grid.add_row(*cells)
    return grid


def table(job: dict[str, Any], since: float = 0.0) -> Table:
    """One row a stage. ``since``: seconds since the job was read, so that running times go on between reads."""
    grid = Table.grid(padding=(0, 1), expand=False)
    grid.add_column(width=10)
    grid.add_column(width=9)
    grid.add_column(width=9, justify="right")
    grid.add_column(overflow="fold")
    for stage in job["stages"]:
        word = STATE_WORDS.get(stage["state"], stage["state"])
        seconds = stage["elapsed_s"]
        if stage["state"] == "running" and seconds is not None:
            seconds += since
        style = STYLES.get(word, "")
        attempt = f"attempt {stage['attempt']}: " if stage["attempt"] > 1 else ""
        last: Any = Text(attempt + note(stage), style="dim" if word in ("waiting", "skipped") else "")
        if stage["state"] == "running":
            last = running_note(stage)
        shown = duration(seconds) if word not in ("skipped", "waiting") else ""
        grid.add_row(Text("  " + stage["stage"]), Text(word, style=style), Text(shown, style="dim"), last)
    return grid


def plain_line(stage: dict[str, Any]) -> str:
    """The same row as one line of text."""
    word = STATE_WORDS.get(stage["state"], stage["state"])
    shown = duration(stage["elapsed_s"]) if word not in ("skipped", "running", "queued") else ""
    return (
        f"  {stage['stage']:<10} {word:<9} {shown:>9}  {note(stage) if word != 'running' else stage['label']}".rstrip()
    )


class Watcher:
    """Follows one job until it ends."""

    def __init__(self, client: Client, console: Console) -> None:
        self.client = client
        self.console = console
        self._read_at = time.monotonic()
        self._away_since: float | None = None

    def read(self, job_id: str) -> dict[str, Any] | None:
        """The job now; None while the service is away.

        Raises:
            Unreachable: it stayed away for too long.
        """
        try:
            job = self.client.job(job_id)
        except Unreachable:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if now - self._away_since > PATIENCE_S:
                raise
            return None
        self._away_since, self._read_at = None, time.monotonic()
        return job

    def follow(self, job_id: str) -> dict[str, Any]:
        """Show the job until it has ended; returns it as it ended."""
        job = self.client.job(job_id)
        return self._follow_live(job) if self.console.is_terminal else self._follow_plain(job)

    def _until_ended(self, job: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        show(job)
        while job["state"] not in FINAL_JOB_STATES:
            time.sleep(POLL_S)
            job = self.read(job["id"]) or job
            show(job)
        return job

    def _follow_live(self, job: dict[str, Any]) -> dict[str, Any]:
        latest = job

        def picture() -> Group:
            parts: list[Any] = [table(latest, time.monotonic() - self._read_at)]
            if self._away_since is not None:
                parts.append(Text("  the service is away; waiting for it", style="yellow"))
            return Group(*parts)

        with Live(get_renderable=picture, console=self.console, refresh_per_second=5):

            def show(now: dict[str, Any]) -> None:
                nonlocal latest
                latest = now

            return self._until_ended(job, show)

    def _follow_plain(self, job: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, tuple[str, int]] = {}

        def show(now: dict[str, Any]) -> None:
            for stage in now["stages"]:
                state = (stage["state"], stage["attempt"])
                if state[0] not in ("waiting", "ready") and told.get(stage["stage"]) != state:
                    told[stage["stage"]] = state
                    self.console.print(plain_line(stage), markup=False, soft_wrap=True)

        return self._until_ended(job, show)
