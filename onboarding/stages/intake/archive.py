"""Unpacking untrusted archives in memory, under caps. Nothing is written to disk and nothing is executed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from onboarding.problem import Problem

_DRIVE_LETTER = 1


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a model definition may be at most."""

    total_bytes: int = 256 * 2**20
    file_bytes: int = 64 * 2**20
    entries: int = 2000
    depth: int = 16
    """Folders above a file, and its own name."""
    name_bytes: int = 512
    ratio: int = 200
    """Unpacked over packed size; archives below one MiB unpacked are exempt."""


CAPS = Caps()


def too_large(what: str, limit: int) -> Problem:
    """The refusal for a definition that passes a cap."""
    return Problem(
        "definition-too-large", f"{what} is larger than allowed", f"the limit is {limit}", status=413, limit=limit
    )


def safe_name(name: str) -> str:
    """A member's path, normalised, or a refusal.

    Raises:
        Problem: ``unsafe-path``: absolute, ``..``, a drive, a backslash, NUL or another control character.
    """
    shown = name[:200].encode("unicode_escape").decode()
    reason = ""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise Problem("unsafe-path", "a file's name is not UTF-8", f"the name is {shown!r}", file=shown) from None
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        reason = "it holds a control character"
    elif "\\" in name:
        reason = "it holds a backslash"
    elif name.startswith("/"):
        reason = "it is absolute"
    elif len(name) > _DRIVE_LETTER and name[_DRIVE_LETTER] == ":":
        reason = "it names a drive"
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        reason = "it leaves the archive by '..'"
    elif not parts:
        reason = "it is empty"
    elif len(parts) > CAPS.depth:
        reason = f"it is deeper than {CAPS.depth} folders"
    elif len(encoded) > CAPS.name_bytes:
        reason = f"it is longer than {CAPS.name_bytes} bytes"
    if reason:
        raise Problem("unsafe-path", f"the path {shown!r} is refused", reason, file=shown)
    return "/".join(parts)


class Collector:
    """Takes files one by one and refuses what passes a cap or collides."""

    def __init__(self, packed_bytes: int | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self._folded: dict[str, str] = {}
        self._folders: set[str] = set()
        self._entries = 0
        self._total = 0
        self._packed = packed_bytes

    def count_entry(self) -> None:
        """Count one archive member of any kind."""
        self._entries += 1
        if self._entries > CAPS.entries:
            raise too_large("the number of entries", CAPS.entries)

    def budget(self) -> int:
        """Bytes that the next file may have."""
        return min(CAPS.file_bytes, CAPS.total_bytes - self._total)

    def add(self, name: str, content: bytes) -> None:
        """Take one file.

        Raises:
            Problem: unsafe name, duplicate, collision after case folding, or over a cap.
        """
        path = safe_name(name)
        folded = path.casefold()
        if folded in self._folded:
            other = self._folded[folded]
            how = "appears twice" if other == path else f"differs from {other!r} by case only"
            raise Problem("duplicate-file", f"{path!r} {how}", "every file once, under one spelling", file=path)
        parents = ["/".join(folded.split("/")[:i]) for i in range(1, folded.count("/") + 1)]
        if folded in self._folders or any(parent in self._folded for parent in parents):
            raise Problem("duplicate-file", f"{path!r} is a file and a folder", "rename one of them", file=path)
        if len(content) > CAPS.file_bytes:
            raise too_large(f"the file {path!r}", CAPS.file_bytes)
        self._total += len(content)
        if self._total > CAPS.total_bytes:
            raise too_large("the unpacked definition", CAPS.total_bytes)
        if self._packed is not None and self._total > max(2**20, CAPS.ratio * self._packed):
            raise Problem(
                "archive-bomb",
                "the archive unpacks to far more than it holds",
                f"more than {CAPS.ratio} times its {self._packed} bytes",
                limit=CAPS.ratio,
            )
        self._folded[folded] = path
        self._folders.update(parents)
        self.files[path] = content


class _Bounded:
    """A decompressed stream that ends in a refusal past its limit (headers of a tar count too)."""

    def __init__(self, inner: IO[bytes], limit: int, packed: int) -> None:
        self._inner, self._limit, self._packed, self._read = inner, limit, packed, 0

    def read(self, size: int = -1) -> bytes:
        wanted = self._limit + 1 if size is None or size < 0 else size
        data = self._inner.read(wanted)
        self._read += len(data)
        if self._read > self._limit:
            raise too_large("the unpacked archive", self._limit)
        if self._read > max(2**20, CAPS.ratio * self._packed):
            raise Problem(
                "archive-bomb",
                "the archive unpacks to far more than it holds",
                f"more than {CAPS.ratio} times its {self._packed} bytes",
                limit=CAPS.ratio,
            )
        return data


def _damaged(error: Exception) -> Problem:
    return Problem("archive-damaged", "the archive cannot be read", str(error) or type(error).__name__)


def _refused_member(name: str, what: str) -> Problem:
    return Problem(
        "unsafe-entry", f"{name[:200]!r} is {what}", "only plain files and folders are taken", file=name[:200]
    )


def _zip_entries(data: bytes, collector: Collector) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if len(archive.infolist()) > CAPS.entries:
            raise too_large("the number of entries", CAPS.entries)
        for info in archive.infolist():
            collector.count_entry()
            # zipfile replaces NUL and backslashes in ``filename``: the name as stored is what must be safe.
            name = safe_name(info.orig_filename)
            mode = info.external_attr >> 16
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused_member(name, "a link or a special file")
            if info.flag_bits & 1:
                raise Problem("archive-encrypted", f"{name!r} is encrypted", "send it without a password", file=name)
            if info.is_dir():
                continue
            if info.file_size > collector.budget():
                raise too_large(f"the file {name!r}", collector.budget())
            if info.file_size > max(2**20, CAPS.ratio * info.compress_size):
                raise Problem(
                    "archive-bomb", f"{name!r} unpacks to far more than it holds", "", file=name, limit=CAPS.ratio
                )
            with archive.open(info) as member:
                # the header's size may lie: read at most one byte more than allowed
                content = member.read(collector.budget() + 1)
            collector.add(name, content)


def _tar_entries(stream: IO[bytes], collector: Collector) -> None:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            collector.count_entry()
            if member.isdir():
                if member.name.strip("./"):
                    safe_name(member.name)
                continue
            name = safe_name(member.name)
            if not member.isreg() or member.issparse():
                raise _refused_member(name, "a link or a special file")
            if member.size > collector.budget():
                raise too_large(f"the file {name!r}", collector.budget())
            source = archive.extractfile(member)
            content = source.read() if source is not None else b""
            if len(content) != member.size:
                raise tarfile.ReadError(f"{name} is cut off")
            collector.add(name, content)


def _decompressed(data: bytes) -> IO[bytes] | None:
    raw = io.BytesIO(data)
    if data[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if data[:3] == b"BZh":
        return bz2.BZ2File(raw)
    if data[:6] == b"\xfd7zXZ\x00":
        return lzma.LZMAFile(raw)
    return raw if data[257:262] == b"ustar" else None


def is_archive(data: bytes) -> bool:
    """Whether the content is a zip or a (compressed) tar, by its first bytes."""
    return data[:4] in (b"PK\x03\x04", b"PK\x05\x06") or _decompressed(data) is not None


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of a zip, tar, tar.gz, tar.bz2 or tar.xz.

    Raises:
        Problem: not an archive, damaged, or anything in it is refused.
    """
    collector = Collector(packed_bytes=len(data))
    try:
        if data[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            _zip_entries(data, collector)
        else:
            stream = _decompressed(data)
            if stream is None:
                raise Problem("not-an-archive", "this is neither a zip nor a tar archive", "", status=415)
            _tar_entries(cast(IO[bytes], _Bounded(stream, CAPS.total_bytes + 2**22, len(data))), collector)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(error) from None
    except (NotImplementedError, RuntimeError, ValueError, UnicodeError, OverflowError) as error:
        # zipfile: unknown compression; tarfile: impossible numbers in headers
        raise _damaged(error) from None
    return collector.files


def _walk(folder: Path, top: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            raise _refused_member(path.relative_to(top).as_posix(), "a link")
        if path.is_dir():
            if path.name not in (".git", "__pycache__", ".cache"):
                yield from _walk(path, top)
        elif path.is_file():
            yield path
        else:
            raise _refused_member(path.relative_to(top).as_posix(), "a special file")


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder, under the same rules as an archive.

    Raises:
        Problem: links, special files, or over a cap.
    """
    collector = Collector()
    for path in _walk(folder, folder):
        collector.count_entry()
        if path.stat().st_size > collector.budget():
            raise too_large(f"the file {path.name!r}", collector.budget())
        collector.add(path.relative_to(folder).as_posix(), path.read_bytes())
    return collector.files


def normalised_tar(files: dict[str, bytes]) -> bytes:
    """One tar whose bytes depend on the files' paths and contents alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(files[name]), 0o644, 0
            archive.addfile(info, io.BytesIO(files[name]))
    return buffer.getvalue()
