"""Reading a step's capped log file by byte offset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CHUNK = 256 * 1024


@dataclass(frozen=True)
class LogChunk:
    """A part of a log: whole UTF-8 characters, and where to go on."""

    text: str
    next_offset: int
    size: int


def read_chunk(path: Path, offset: int, limit: int = CHUNK) -> LogChunk:
    """Read from ``offset``; a negative offset counts from the end. An absent file is an empty log."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            file.seek(start)
            raw = file.read(limit)
    except FileNotFoundError:
        return LogChunk("", 0, 0)
    raw = raw[: whole_characters(raw)]
    return LogChunk(raw.decode("utf-8", "replace"), start + len(raw), size)


def whole_characters(raw: bytes) -> int:
    """Length of ``raw`` without an unfinished UTF-8 character at its end."""
    for back in range(1, min(4, len(raw)) + 1):
        byte = raw[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(raw) - back if needed > back else len(raw)
    return len(raw)
