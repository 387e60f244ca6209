"""What a stage is given: its inputs, a scratch folder, the artifact store, the policy, and a way to report.

A stage is ``run(context: StageContext) -> Result``. It reads upstream results, writes only to ``context.scratch``
and to artifacts, and may be run again at any time with the same outcome. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from onboarding.architecture import Record
from onboarding.artifacts import ArtifactRef, ArtifactStore
from onboarding.pipeline import JobOptions, Profile
from onboarding.policy import Policy
from onboarding.settings import Settings

R = TypeVar("R", bound="StageResult")


class StageResult(Record):
    """Base of every stage's stored result."""

    outcome: str = "ok"
    """What the pipeline's edges look at: ``ok``, ``accepted``, ``refused``, ``misaligned`` ..."""
    summary: str = ""
    """One line for the terminal and the Gantt, e.g. ``7 accepted, 0 refused``."""


class Emit(Protocol):
    """Sends one event: a kind and small JSON data."""

    def __call__(self, kind: str, **data: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Everything that one attempt of one step may use."""

    job_id: str
    job_name: str
    stage: str
    key: str
    """Operator spec digest for per-operator stages, else empty."""
    attempt: int
    options: JobOptions
    profile: Profile
    settings: Settings
    scratch: Path
    """Private to this attempt and empty at its start."""
    artifacts: ArtifactStore
    policy: Policy
    emit: Emit
    load_result: Callable[[str, str], dict[str, Any] | None]
    """(stage, key) -> stored result of the newest succeeded step, or None."""
    earlier: Callable[[str], list[tuple[str, dict[str, Any]]]] = field(default=lambda stage: [])
    """stage -> job id and result of the owner's earlier jobs that succeeded on the same definition, newest first."""
    definition: str = ""
    """Digest of the job's definition artifact, as it was submitted; what intake reads."""
    input: dict[str, Any] = field(default_factory=dict)
    """What an edge back handed to this attempt, e.g. ``{"dropped": [...]}`` for ``align``; empty on the way forward."""

    def result(self, stage: str, model: type[R], key: str = "") -> R:
        """An upstream stage's result.

        Raises:
            LookupError: the stage has not finished.
        """
        data = self.load_result(stage, key)
        if data is None:
            raise LookupError(f"stage {stage} {key} has no result yet")
        return model.model_validate(data)

    def progress(self, done: float, total: float, label: str = "") -> None:
        """Report progress: ``done`` of ``total`` units, and what is being worked on."""
        self.emit("progress", done=done, total=total, label=label)

    def metric(self, series: str, step: float, value: float) -> None:
        """Report one point of a live curve."""
        self.emit("metric", series=series, step=step, value=value)

    def save(self, name: str, data: bytes | Path, media_type: str) -> ArtifactRef:
        """Store an artifact under this job and return its reference."""
        ref = self.artifacts.put(data, name=name, media_type=media_type)
        self.emit("artifact", **ref.model_dump())
        return ref
