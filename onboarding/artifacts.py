"""Content-addressed storage for what stages produce, on any fsspec URL. Free of torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import fsspec

from onboarding.architecture import Record


class ArtifactRef(Record):
    """A stored artifact: the digest is its address."""

    digest: str
    """sha256 of the content, 64 hex digits."""
    name: str
    size: int
    media_type: str


class ArtifactStore:
    """Write-once store: ``put`` is idempotent, ``get`` verifies the digest.

    Args:
        url: ``file:///path``, ``s3://bucket/prefix`` or any fsspec URL.
        storage_options: passed to fsspec (credentials, endpoint).
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.url, **storage_options)

    def _path(self, digest: str) -> str:
        if len(digest) != 64 or any(c not in "0123456789abcdef" for c in digest):
            raise ValueError(f"not a sha256 digest: {digest!r}")
        return f"{self._root}/{digest[:2]}/{digest}"

    def put(self, data: bytes | Path, *, name: str, media_type: str) -> ArtifactRef:
        """Store content (or a file's content) and return its reference; storing it again changes nothing."""
        content = data.read_bytes() if isinstance(data, Path) else data
        digest = hashlib.sha256(content).hexdigest()
        path = self._path(digest)
        if not self._fs.exists(path):
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            # A partial write never stands under its final name: write aside, then move.
            temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
            self._fs.pipe_file(temporary, content)
            self._fs.mv(temporary, path)
        return ArtifactRef(digest=digest, name=name, size=len(content), media_type=media_type)

    def get(self, digest: str) -> bytes:
        """The content of an artifact.

        Raises:
            FileNotFoundError: no such artifact.
            ValueError: the stored bytes do not have this digest.
        """
        content: bytes = self._fs.cat_file(self._path(digest))
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"artifact {digest} is damaged")
        return content

    def has(self, digest: str) -> bool:
        """Whether the artifact is stored."""
        return bool(self._fs.exists(self._path(digest)))
