"""One settings class: every value can be set by an ``ONBOARD_`` environment variable. Free of torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cached_property
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

SOCKET_PATH_LIMIT = 100
"""Bytes; the kernel takes at most 107."""


def config_home() -> Path:
    """The user's configuration folder (``$XDG_CONFIG_HOME/onboard`` or ``~/.config/onboard``)."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "onboard"


def default_workers() -> int:
    """Two steps side by side where there are two cores, but one where there is a GPU: timings want it to themselves."""
    return 1 if Path("/dev/nvidiactl").exists() else min(2, len(os.sched_getaffinity(0)))


class Settings(BaseSettings):
    """Where things live and how much is allowed."""

    model_config = SettingsConfigDict(env_prefix="ONBOARD_", extra="ignore")

    home: Path = Path(".onboard")
    """Embedded state: database, broker socket, artifacts, logs, scratch."""
    database_url: str = ""
    """SQLAlchemy URL; empty means SQLite in ``home``."""
    broker_url: str = ""
    """Celery broker URL; empty means an embedded valkey server in ``home``."""
    artifacts_url: str = ""
    """fsspec URL (``file://``, ``s3://``); empty means files in ``home``."""
    host: str = "127.0.0.1"
    port: int = 8040
    public_url: str = ""
    """Address that users see in printed links; empty means ``http://host:port``."""
    allowed_hosts: list[str] = []
    """Host names the API answers to besides loopback and ``host`` (JSON list)."""
    key_file: Path = Field(default_factory=lambda: config_home() / "key")
    """Where the CLI finds the API key that ``serve`` made (mode 0600)."""
    api_key: SecretStr | None = None
    """Overrides ``key_file`` for the CLI."""
    max_upload_bytes: int = 64 * 2**20
    step_memory_bytes: int = 8 * 2**30
    step_wall_s: float = 3600.0
    lease_s: float = 10.0
    heartbeat_s: float = 3.0
    sweep_s: float = 2.0
    log_bytes: int = 16 * 2**20
    """Size at which a step's log is capped."""
    stages_package: str = "onboarding.stages"
    """Python package that step processes import stages from; another one serves tests of the machinery."""
    cpu_workers: int = Field(default_factory=default_workers, ge=1)
    """Steps that one worker runs at the same time; the cores are shared out among them."""
    unsafe_no_sandbox: bool = False
    """Run untrusted code without a sandbox. Never the default."""

    @cached_property
    def resolved_home(self) -> Path:
        """``home`` as an absolute path."""
        return self.home.expanduser().resolve()

    def resolved_database_url(self) -> str:
        """The database URL in force."""
        return self.database_url or f"sqlite:///{self.resolved_home / 'onboard.db'}"

    def broker_socket(self) -> Path:
        """Socket of the embedded broker: in ``home``, or in a private folder where that path is too long for one."""
        socket = self.resolved_home / "broker.sock"
        if len(os.fsencode(socket)) <= SOCKET_PATH_LIMIT:
            return socket
        digest = hashlib.sha256(os.fsencode(self.resolved_home)).hexdigest()[:16]
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        return Path(base) / f"onboard-{os.getuid()}-{digest}" / "broker.sock"

    def resolved_broker_url(self) -> str:
        """The Celery broker URL in force."""
        return self.broker_url or f"redis+socket://{self.broker_socket()}"

    def resolved_artifacts_url(self) -> str:
        """The artifact store's URL in force."""
        return self.artifacts_url or (self.resolved_home / "artifacts").as_uri()

    def base_url(self) -> str:
        """The address that users see."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return (self.public_url or f"http://{f'[{host}]' if ':' in host else host}:{self.port}").rstrip("/")
