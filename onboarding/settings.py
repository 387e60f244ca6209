"""One settings class: every value can be set by an ``ONBOARD_`` environment variable. Free of torch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Literal

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


AnswerMode = Literal["schema", "tool", "json", "text"]
"""How a structured answer is asked for: a response schema, one forced tool, JSON mode, or words in the prompt."""


class LlmSettings(BaseSettings):
    """The language model that writes and repairs kernels, and what it may cost. Set by ``ONBOARD_LLM_`` variables."""

    model_config = SettingsConfigDict(env_prefix="ONBOARD_LLM_", extra="ignore")

    base_url: str = ""
    """Address of an OpenAI-compatible endpoint, e.g. ``http://127.0.0.1:8000/v1``; empty: no language model."""
    model: str = ""
    api_key: SecretStr | None = None
    answers: Literal["auto"] | AnswerMode = "auto"
    """How structured answers are asked for; ``auto`` takes the first that the endpoint serves."""
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    """Sent only if set: some models refuse it."""
    context_tokens: int = Field(default=65_536, ge=1024)
    answer_tokens: int = Field(default=16_384, ge=64)
    """Longest answer, also what a call reserves of its budget."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest time for one answer, whatever the server trickles."""
    retries: int = Field(default=4, ge=0, le=20)
    """After connection errors, time-outs, 429 and 5xx; nothing else retries."""
    requests_per_minute: int = Field(default=60, ge=1)
    """Over all jobs and processes that share the database."""
    price_in: float = Field(default=0.0, ge=0)
    """USD for a million tokens read."""
    price_cached: float | None = Field(default=None, ge=0)
    """USD for a million tokens read from the provider's prompt cache; ``price_in`` by default."""
    price_out: float = Field(default=0.0, ge=0)
    """USD for a million tokens written."""
    job_tokens: int = Field(default=2_000_000, ge=0)
    job_money: float = Field(default=20.0, ge=0)
    job_gpu_s: float = Field(default=3600.0, ge=0)
    """GPU-seconds of judging and tuning that a job's searches may take."""
    job_wall_s: float = Field(default=6 * 3600.0, ge=0)
    """Seconds of calls and checks, summed over a job's operators."""
    project_tokens: int = Field(default=20_000_000, ge=0)
    project_money: float = Field(default=200.0, ge=0)
    role_tokens: dict[str, int] = {}
    """Tokens a job may spend in one role (JSON), e.g. ``{"reporter": 50000}``."""
    seeds: int = Field(default=3, ge=1, le=32)
    """Independent first candidates for an operator before the search only refines."""
    rounds: int = Field(default=16, ge=1, le=200)
    """Candidates written for one operator, seeds and repairs together."""

    @property
    def configured(self) -> bool:
        """Whether there is a language model to ask."""
        return bool(self.base_url and self.model)


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
    llm: LlmSettings = Field(default_factory=LlmSettings)
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
