"""The artifact store: addressed by content, written once, checked on reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboarding.artifacts import ArtifactStore

TEXT = b"a kernel"
# printf 'a kernel' | sha256sum
DIGEST = "4fff0d3e643b3894c17a0738fbdc591953aa722c9d42774425090accc4377126"


@pytest.fixture(params=["file", "memory"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    return ArtifactStore((tmp_path / "artifacts").as_uri() if request.param == "file" else f"memory://{tmp_path}")


def test_what_is_put_can_be_got_by_its_digest(artifacts: ArtifactStore, tmp_path: Path) -> None:
    ref = artifacts.put(TEXT, name="kernel.py", media_type="text/x-python")
    assert (ref.digest, ref.size, ref.name) == (DIGEST, 8, "kernel.py")
    assert artifacts.has(DIGEST)
    assert artifacts.get(DIGEST) == TEXT
    (tmp_path / "same").write_bytes(TEXT)
    assert artifacts.put(tmp_path / "same", name="other", media_type="text/plain").digest == DIGEST


def test_what_was_never_put_is_absent(artifacts: ArtifactStore) -> None:
    assert not artifacts.has("0" * 64)
    with pytest.raises(FileNotFoundError):
        artifacts.get("0" * 64)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_only_digests_are_addresses(artifacts: ArtifactStore, digest: str) -> None:
    with pytest.raises(ValueError, match="not a sha256 digest"):
        artifacts.get(digest)


def test_damage_is_noticed(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path.as_uri())
    artifacts.put(TEXT, name="kernel.py", media_type="text/x-python")
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    file.write_bytes(b"b kernel")
    with pytest.raises(ValueError, match="is damaged"):
        artifacts.get(DIGEST)
