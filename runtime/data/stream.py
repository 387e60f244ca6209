"""The stream of rows that a run trains on.

A step of B sequences has B *lanes*: lane j gives its j-th row and is fed by documents j, j + B, j + 2B ... of the
endless order. The place of a lane is two numbers (document, token within it), so a stream is taken up exactly where it
was left, in the middle of an epoch or of a document; and since lanes depend on B alone, any number of ranks that
divides B sees the same steps. A rank tokenizes the documents of its own lanes only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.config import DataConfig
from runtime.data.order import Order
from runtime.data.sources import Source
from runtime.data.tokens import Document, Encoder
from runtime.refusal import Refused

IGNORED = -100
"""Label of a position that the loss does not count."""
Place = tuple[int, int]
"""Of a lane: document, token within it."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packed rows of one microbatch."""

    ids: Tensor
    """int64 [rows, length]; padding is 0."""
    labels: Tensor
    """int64 [rows, length]; the *next* token, or -100 where it is not counted."""
    positions: Tensor
    """int64 [rows, length]; from 0 in every document: where it restarts, attention and linear states restart too."""
    mask: Tensor
    """bool [rows, length]; false in padding."""
    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document of each row; they sum to the row's length, padding is a document of its own."""

    @property
    def cu_seqlens(self) -> Tensor:
        """Document boundaries over all rows, one after another: int32 [documents + 1], from 0."""
        flat = [n for row in self.lengths for n in row]
        return torch.tensor([0, *np.cumsum(flat)], dtype=torch.int32)

    @property
    def trained(self) -> int:
        """Tokens that the loss counts."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Rows:
        """On the device, without waiting for the copy."""
        tensors = {k: getattr(self, k).to(device, non_blocking=True) for k in ("ids", "labels", "positions", "mask")}
        return Rows(**tensors, lengths=self.lengths)


class Row(NamedTuple):
    """One row as plain lists."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    lengths: list[int]
    padding: int


class Lane:
    """One sequence of every step."""

    def __init__(self, number: int, lanes: int, place: Place | None, read: Callable[[int], Document], records: int):
        self.number, self.lanes, self.records = number, lanes, records
        self.document, self.offset = place or (number, 0)
        self._read = read
        self._held: tuple[int, Document] | None = None

    @property
    def place(self) -> Place:
        """Where the next row begins."""
        return self.document, self.offset

    def row(self, length: int, packing: str) -> Row:
        """The next row."""
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        useless = 0
        while len(ids) < length:
            document = self._current()
            if not document.useful:
                useless += 1
                if useless > self.records:
                    advice = "documents of fewer than two tokens, and conversations without an answer, give nothing"
                    raise Refused("data-empty", "a whole epoch of the data holds nothing to train on", advice)
                self._next()
                continue
            room = length - len(ids)
            piece = min(len(document) - self.offset, room if packing == "cut" else length)
            if piece > room or (packing == "none" and ids):
                break
            end = self.offset + piece
            ids += document.ids[self.offset : end].tolist()
            labels += _labels(document, self.offset, end)
            positions += range(piece)
            lengths.append(piece)
            self.offset = end
            if end >= len(document):
                self._next()
        padding = length - len(ids)
        if padding:
            ids += [0] * padding
            labels += [IGNORED] * padding
            positions += range(padding)
            lengths.append(padding)
        return Row(ids, labels, positions, lengths, padding)

    def _current(self) -> Document:
        if self._held is None or self._held[0] != self.document:
            self._held = self.document, self._read(self.document)
        return self._held[1]

    def _next(self) -> None:
        self.document, self.offset = self.document + self.lanes, 0


class Stream:
    """This rank's share of every step.

    Args:
        source: the records.
        encoder: makes documents of them.
        config: lengths, packing and order.
        lanes: sequences of one step over all ranks.
        mine: the lanes of this rank.
        microbatch: rows that are run together.
        places: of all lanes, by an earlier :meth:`places`; None starts at the beginning.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        config: DataConfig,
        *,
        lanes: int,
        mine: Sequence[int],
        microbatch: int,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.config, self.microbatch = config, microbatch
        order = Order(len(source), block=config.shuffle_block, shuffle=config.shuffle, seed=config.seed)

        def read(document: int) -> Document:
            record = order.record(document)
            return encoder(source.read(record), source.where(record))

        self._lanes = [Lane(j, lanes, places[j] if places else None, read, len(source)) for j in mine]

    def step(self) -> list[Rows]:
        """The microbatches of the next step."""
        rows = [lane.row(self.config.sequence_length, self.config.packing) for lane in self._lanes]
        return [_stack(rows[i : i + self.microbatch]) for i in range(0, len(rows), self.microbatch)]

    def places(self) -> list[Place]:
        """Of this rank's lanes, in their order."""
        return [lane.place for lane in self._lanes]


class Prefetcher:
    """Prepares steps in a thread; ``places`` are those of the steps handed out, not of those prepared."""

    def __init__(self, stream: Stream, ahead: int = 2) -> None:
        self._queue: queue.Queue[tuple[list[Rows], list[Place]] | BaseException] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._places = stream.places()
        self._thread = threading.Thread(target=self._fill, args=(stream,), name="data", daemon=True)
        self._thread.start()

    def step(self) -> list[Rows]:
        """The next step's microbatches; what the thread raised is raised here."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        rows, self._places = item
        return rows

    def places(self) -> list[Place]:
        """Where this rank's lanes stand after the last step handed out."""
        return self._places

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _fill(self, stream: Stream) -> None:
        while not self._stop.is_set():
            try:
                item: Any = (stream.step(), stream.places())
            except BaseException as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return


def _labels(document: Document, begin: int, end: int) -> list[int]:
    """The next token of each of ``begin`` to ``end``, -100 where it does not count or there is none."""
    following = document.ids[begin + 1 : end + 1]
    labels = np.where(document.trained[begin + 1 : end + 1], following, IGNORED).tolist()
    return labels if len(labels) == end - begin else [*labels, IGNORED]


def _stack(rows: Sequence[Row]) -> Rows:
    ids = torch.tensor([row.ids for row in rows])
    real = ids.shape[1] - torch.tensor([row.padding for row in rows])
    return Rows(
        ids=ids,
        labels=torch.tensor([row.labels for row in rows]),
        positions=torch.tensor([row.positions for row in rows]),
        mask=torch.arange(ids.shape[1]) < real[:, None],
        lengths=tuple(tuple(row.lengths) for row in rows),
    )
