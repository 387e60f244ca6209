"""The service as the command line starts, stops and shows it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from api.cli import output
from api.cli.bundles import pull
from api.cli.client import Client
from onboarding.problem import Problem
from onboarding.settings import Settings

START_S = 60.0
DEMO_MODEL = "kimi-linear"


def ensure_running(client: Client, settings: Settings) -> bool:
    """Start the service, detached, unless it answers; whether it had to be started.

    Raises:
        Problem: it does not start.
    """
    if client.alive():
        return False
    log = settings.resolved_home / "logs" / "serve.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # It may print the API key: for the owner's eyes only.
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.embedded"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not client.alive():
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").strip().splitlines()
            title = lines[-1] if lines else "the service does not start"
            raise Problem("service-not-started", title, f"its log is {log}")
        time.sleep(0.1)
    return True


def stop(settings: Settings) -> str:
    """Stop the service of this home; says what was done.

    Raises:
        Problem: it does not stop.
    """
    pid_file = settings.resolved_home / "serve.pid"
    pid = pid_file.read_text().strip() if pid_file.exists() else ""
    if not pid.isdecimal() or not holds_lock(pid_file):
        return f"no service runs on {settings.resolved_home}"
    os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + 10
    while holds_lock(pid_file):
        if time.monotonic() > deadline:
            raise Problem("service-not-stopped", f"process {pid} does not end", f"kill -9 {pid}")
        time.sleep(0.05)
    return f"stopped (process {pid})"


def holds_lock(pid_file: Path) -> bool:
    """Whether a service holds this home: its lock ends with it, its pid may be another program's by now."""
    import fcntl

    with contextlib.suppress(FileNotFoundError), pid_file.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run_demo(to: Path, profile: str) -> None:
    """Service, job, bundle; ends with where everything is."""
    from api.cli.main import conclude, connect, watch_until_end

    client = connect()
    settings = client.settings
    started = ensure_running(client, settings)
    how = "started" if started else "already running"
    output.say(f"onboard serve: {client.url}  ({how}; key in {settings.key_file}; stop it with: onboard stop)")
    job = client.submit(DEMO_MODEL, name=None, options={"profile": profile})
    output.say(f"submitted {job['name']} as job {job['id']}  (POST /v1/jobs -> 202)")
    page = job["links"]["page"]
    output.say(f"dashboard: {client.sign_in_link(page)}\n")
    job = watch_until_end(client, job["id"])
    conclude(client, job)
    folder = pull(client, job["id"], to, replace=True)
    output.say(f"\nbundle  {folder}      verify: onboard bundle verify {folder}")
    output.say(f"report  {folder / 'report.html'}      watch: {client.url}{page}")
    output.say(f"next    onboard finetune {folder} --data examples/chat.jsonl --twin")
    output.say("        onboard submit path/to/your/config.json --watch")
