"""What package stores."""

from __future__ import annotations

from onboarding.artifacts import ArtifactRef
from onboarding.context import StageResult


class PackageResult(StageResult):
    """The finished bundle."""

    bundle: ArtifactRef
    """The bundle as tar.gz."""
    bundle_name: str
    """``<model>-<version>``: the folder inside the archive."""
    report: ArtifactRef
    """The offline HTML report."""
    kernels: list[str]
    """Operator spec digests with an accepted kernel inside."""
    public_key: str
    """Ed25519 public key, hex."""
    manifest_sha256: str
