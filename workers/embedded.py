"""``onboard serve``: broker, worker and API as child processes of one thin supervisor, which imports none of them.

A child that dies is started again. All children carry a death signal, so nothing is left when the supervisor itself is
killed. A lock on ``home/serve.pid`` keeps a second one out; the kernel drops it with the process: it never goes stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onboarding.settings import Settings
from workers.broker import NoBroker, answers, broker_command, private_folder
from workers.children import Child
from workers.environment import check_packages, clean_environment

POLL_S = 0.05
GRACE_S = 1.2
"""Time to end by themselves; then children are killed, so that all are gone within 2 s."""
START_S = 60.0
PORT_WAIT_S = 2.0
FIRST_TRIES = 3
"""A child that dies this often before the service is ready is not started again: the service gives up."""


class ServeError(Exception):
    """The service cannot start; the message says why and what to do."""


class Service:
    """The embedded service of one home."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.home = settings.resolved_home
        self.stopping = False
        environment = dict(os.environ)
        clean_environment(environment)
        environment |= {
            "ONBOARD_HOME": str(self.home),
            "ONBOARD_HOST": settings.host,
            "ONBOARD_PORT": str(settings.port),
            "ONBOARD_BROKER_URL": settings.resolved_broker_url(),
            "PYTHONUNBUFFERED": "1",
        }
        self.broker: Child | None = None
        if not settings.broker_url:
            self.broker = self._child("broker", broker_command(settings.broker_socket(), self.home), environment)
        self.worker = self._child("worker", [sys.executable, "-P", "-m", "workers.run"], environment)
        # -P and --app-dir: the folder where `serve` was started must not be able to shadow an import.
        api = [sys.executable, "-P", "-m", "uvicorn", "api.app:create_app", "--factory", "--no-access-log"]
        api += ["--app-dir", str(Path(__file__).parents[1])]
        api += ["--host", settings.host, "--port", str(settings.port), "--timeout-graceful-shutdown", "1"]
        self.api = self._child("api", api, environment, shows_output=True)

    def _child(self, name: str, command: Sequence[str], environment: dict[str, str], **more: Any) -> Child:
        return Child(
            name=name, command=command, environment=environment, log=self.home / "logs" / f"{name}.log", **more
        )

    @property
    def children(self) -> list[Child]:
        """The children, in the order in which they start."""
        return [child for child in (self.broker, self.worker, self.api) if child is not None]

    def run(self) -> None:
        """Start everything, say when it is ready, keep it alive, stop it in order.

        Raises:
            ServeError: it cannot start.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        check_port(self.settings.host, self.settings.port)
        try:
            if self.broker is not None:
                private_folder(self.settings.broker_socket().parent)
                self._start(self.broker, partial(answers, self.settings.broker_socket()))
            self.worker.start()
            self._start(self.api, self._api_answers)
            if not self.stopping:
                print(ready_line(self.settings), flush=True)
            while not self.stopping:
                for child in self.children:
                    child.look_after()
                time.sleep(POLL_S)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop worker and API, then the broker; nothing is left after 2 s."""
        deadline = time.monotonic() + GRACE_S
        for child in (self.worker, self.api):
            child.signal(signal.SIGTERM)
        for child in (self.worker, self.api):
            child.wait(deadline)
        if self.broker is not None:
            self.broker.signal(signal.SIGTERM)
            self.broker.wait(deadline + 0.4)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _start(self, child: Child, ready: Callable[[], bool]) -> None:
        """Start a child and wait until it answers."""
        child.start()
        deadline = time.monotonic() + START_S
        while not self.stopping and not ready():
            for each in self.children:
                if each.process is not None or each.deaths:
                    each.look_after()
                if each.deaths >= FIRST_TRIES:
                    raise ServeError(f"the {each.name} does not start; {each.log} ends with:\n{tail(each.log)}")
            if time.monotonic() > deadline:
                raise ServeError(f"the {child.name} did not answer within {START_S:.0f} s; see {child.log}")
            time.sleep(POLL_S)

    def _api_answers(self) -> bool:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        connection = http.client.HTTPConnection(host, self.settings.port, timeout=2)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/healthz")
            # Another program may hold the port: only our own child's answer counts.
            alive = self.api.process is not None and self.api.process.poll() is None
            return connection.getresponse().status == 200 and alive
        return False


def check_port(host: str, port: int) -> None:
    """Find out early and say clearly that the port is taken; a predecessor that is just ending gets a moment.

    Raises:
        ServeError: another program listens there, or the address is not ours.
    """
    deadline = time.monotonic() + PORT_WAIT_S
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    while True:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ServeError(f"cannot listen on {host} port {port} ({error.strerror}); set ONBOARD_PORT") from error
        time.sleep(POLL_S)


def ready_line(settings: Settings) -> str:
    """What is said when the service is ready."""
    url = settings.public_url or f"http://{settings.host}:{settings.port}"
    database = "SQLite" if settings.resolved_database_url().startswith("sqlite") else "PostgreSQL"
    broker = "external broker" if settings.broker_url else "embedded broker"
    workers = f"{settings.cpu_workers} cpu worker{'s' if settings.cpu_workers != 1 else ''}"
    return f"onboard serve: {url}  (key in {settings.key_file}, {database}, {broker}, {workers})"


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


@contextlib.contextmanager
def lock(home: Path) -> Iterator[None]:
    """Hold the home for this process; the file names the holder.

    Raises:
        ServeError: another process holds it.
    """
    private_folder(home)
    with (home / "serve.pid").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ServeError(f"onboard serve already runs on {home} (process {file.read().strip()})") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def serve(settings: Settings) -> int:
    """Run the service until SIGTERM or SIGINT.

    Returns:
        The exit status: 0, or 1 with the reason on standard error.
    """
    clean_environment()
    check_packages()
    try:
        with lock(settings.resolved_home):
            Service(settings).run()
    except (ServeError, NoBroker) as error:
        print(f"onboard serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve(Settings()))
