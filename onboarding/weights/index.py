"""Reading a checkpoint's index and the headers of safetensors files: names, shapes, types, no values. Free of torch."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from onboarding.problem import Problem

INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100 * 2**20
"""The format's own limit."""
MOST_TENSORS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint."""

    name: str
    file: str
    shape: tuple[int, ...] | None = None
    """None: only the file's header would say."""
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What an index says."""

    entries: dict[str, Entry]
    total_bytes: int

    @property
    def files(self) -> int:
        """Number of files."""
        return len({entry.file for entry in self.entries.values()})


def read_checkpoint(files: dict[str, bytes]) -> Checkpoint | None:
    """The checkpoint that a definition's files speak of: its index, and headers of safetensors files that are there.

    Returns:
        None if there is neither.

    Raises:
        Problem: ``weights-index-broken`` with what is wrong.
    """
    found: dict[str, Entry] = {}
    total = 0
    index = next((name for name in sorted(files) if name.endswith("safetensors.index.json")), None)
    if index is not None:
        found, total = _read_index(index, files[index])
    for name in sorted(files):
        if name.endswith(".safetensors"):
            headers = read_header(name, files[name])
            stray = [n for n in headers if n in found and PurePosixPath(found[n].file).name != PurePosixPath(name).name]
            if stray:
                raise _broken(name, f"{stray[0]} is in {name} and, by the index, in {found[stray[0]].file}")
            found |= headers
    return Checkpoint(entries=found, total_bytes=total) if found else None


def _read_index(name: str, raw: bytes) -> tuple[dict[str, Entry], int]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _broken(name, f"it is not JSON: {error}") from None
    table = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(table, dict) or not table:
        raise _broken(name, "it has no weight_map with tensors")
    if len(table) > MOST_TENSORS:
        raise _broken(name, f"it names more than {MOST_TENSORS} tensors")
    for tensor, file in table.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise _broken(name, f"{tensor[:100]!r} is in {str(file)[:100]!r}, which is no safetensors file beside it")
    metadata = data.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else 0
    whole = int(total) if isinstance(total, int | float) and total == total and 0 <= total < 2**63 else 0
    return {tensor: Entry(name=tensor, file=file) for tensor, file in table.items()}, whole


def read_header(name: str, raw: bytes) -> dict[str, Entry]:
    """The tensors of one safetensors file: eight bytes of length, then JSON. The values may be cut off.

    Raises:
        Problem: ``weights-index-broken``.
    """
    if len(raw) < 8:
        raise _broken(name, "it is shorter than a header")
    (length,) = struct.unpack("<Q", raw[:8])
    if length > min(HEADER_BYTES, len(raw) - 8):
        raise _broken(name, f"its header of {length} bytes is not all there")
    try:
        header = json.loads(raw[8 : 8 + length])
        entries = {
            tensor: Entry(name=tensor, file=name, shape=_shape(facts["shape"]), dtype=str(facts["dtype"]))
            for tensor, facts in header.items()
            if tensor != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(name, f"its header cannot be read: {type(error).__name__}") from None
    return entries


def _shape(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**48 for v in values):
        raise ValueError("no shape")
    return tuple(values)


def _broken(name: str, why: str) -> Problem:
    return Problem("weights-index-broken", f"{name} is no usable index of weights", why, file=name)


def pattern(name: str) -> str:
    """A name without its layer and expert numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
