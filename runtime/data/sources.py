"""Records by number out of JSONL, Parquet and text files, local or behind any fsspec address.

A source knows how many records it has and reads any of them, so the place of a reader is one number. Files are listed
and indexed once, when the run starts; nothing is held but the index and a few blocks.
"""

from __future__ import annotations

import bisect
import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import fsspec
import numpy as np

from runtime.config import DataConfig
from runtime.refusal import Refused

Record = Mapping[str, Any]
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
TEXT_DOCUMENT = 1 << 16
"""Bytes of a text file's documents: cut at the last line end before, so that any file streams."""
CACHED_BLOCKS = 4


class File(Protocol):
    """One file of records."""

    path: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """Record ``index``, from 0."""
        ...


class LineFile:
    """A JSONL file: offsets of its lines, read by seeking."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path
        self.offsets = _line_offsets(fs, path)
        self._file: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, index: int) -> Record:
        """The line's object.

        Raises:
            Refused: ``data-not-json`` with file and line.
        """
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        try:
            record = json.loads(self._bytes(begin, end))
        except ValueError as error:
            raise Refused("data-not-json", f"{self.path}: record {index + 1} is not JSON", str(error)) from None
        if not isinstance(record, dict):
            detail = f"it is {type(record).__name__}; one JSON object a line is wanted"
            raise Refused("data-not-json", f"{self.path}: record {index + 1} is no object", detail)
        return record

    def _bytes(self, begin: int, end: int) -> bytes:
        if self._file is None:
            self._file = self.fs.open(self.path, "rb")
        self._file.seek(begin)
        content: bytes = self._file.read(end - begin)
        return content


class TextFile(LineFile):
    """A text file, as documents of at most 64 KiB."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(fs, path)
        lines = self.offsets
        starts = [0] if len(lines) > 1 else []
        for line, after in itertools.pairwise(lines):
            if starts and after - starts[-1] > TEXT_DOCUMENT and line > starts[-1]:
                starts.append(int(line))
        self.offsets = np.array([*starts, int(lines[-1])], dtype=np.int64)

    def read(self, index: int) -> Record:
        """The document as ``{"text": ...}``; bytes that are not UTF-8 are replaced."""
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return {"text": self._bytes(begin, end).decode("utf-8", "replace")}


class ParquetFile:
    """A Parquet file: row groups are read whole, the last few stay."""

    def __init__(self, fs: Any, path: str) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(fs.open(path, "rb"))
        except arrow.ArrowInvalid as error:
            raise Refused("data-not-parquet", f"{path} is not a Parquet file", str(error)) from None
        metadata = self._file.metadata
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        self._blocks: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> Record:
        """The row as a mapping of its columns."""
        group = bisect.bisect_right(self.starts, index) - 1
        if group not in self._blocks:
            self._blocks[group] = self._file.read_row_group(group).to_pylist()
            while len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(group)
        return self._blocks[group][index - int(self.starts[group])]


class Source:
    """All records of all files, numbered in the order of the sorted paths."""

    def __init__(self, files: list[File]) -> None:
        self.files = files
        self.starts = np.concatenate([[0], np.cumsum([len(f) for f in files])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, index: int) -> Record:
        """Record ``index`` of the whole."""
        number = bisect.bisect_right(self.starts, index) - 1
        return self.files[number].read(index - int(self.starts[number]))

    def where(self, index: int) -> str:
        """File and record in words, for messages."""
        number = bisect.bisect_right(self.starts, index) - 1
        return f"{self.files[number].path}, record {index - int(self.starts[number]) + 1}"


def open_source(config: DataConfig) -> Source:
    """List, open and index the files of a config.

    Raises:
        Refused: ``data-missing`` (nothing matches), ``data-format`` (an ending that says nothing), ``data-empty``.
    """
    found: dict[str, Any] = {}
    for pattern in config.files:
        fs, root = fsspec.core.url_to_fs(pattern)
        names = fs.glob(root) if any(c in root for c in "*?[") else [root]
        names = [n for n in names if fs.isfile(n)]
        if not names:
            advice = "check the path; globs and addresses are allowed"
            raise Refused("data-missing", f"no data file at {pattern}", advice)
        found.update(dict.fromkeys(names, fs))
    files = [_open(found[name], name, config) for name in sorted(found)]
    source = Source(files)
    if len(source) == 0:
        listed = ", ".join(f.path for f in files)
        raise Refused("data-empty", f"the data holds no record: {listed}", "one JSON object a line, or rows, or text")
    return source


def _open(fs: Any, path: str, config: DataConfig) -> File:
    kind = config.format
    if kind == "auto":
        ending = "." + path.rpartition(".")[2].lower()
        if ending not in ENDINGS:
            known = ", ".join(ENDINGS)
            raise Refused("data-format", f"{path}: the ending says nothing", f"set data.format, or use one of {known}")
        kind = ENDINGS[ending]  # type: ignore[assignment]
    if kind == "parquet":
        return ParquetFile(fs, path)
    return TextFile(fs, path) if kind == "text" else LineFile(fs, path)


def _line_offsets(fs: Any, path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Starts of the lines that are not blank, and the end, int64 [lines + 1]: one pass over the file."""
    starts = array("q")
    place = 0
    with fs.open(path, "rb") as file:
        for line in file:
            if line.strip():
                starts.append(place)
            place += len(line)
    starts.append(place)
    return np.frombuffer(starts, dtype=np.int64)
