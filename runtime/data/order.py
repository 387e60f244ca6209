"""Which record comes when: endless, another order in every epoch, and any place of it found without the ones before."""

from __future__ import annotations

from typing import Any

import numpy as np


class Order:
    """A number for every document of an endless run -> the record that it is.

    Document n belongs to epoch n // records. Within an epoch blocks of neighbouring records are permuted, and the
    records within each block.

    Args:
        records: in the source.
        block: records that stay together; 1 permutes them freely.
        shuffle: False keeps the source's order.
        seed: of the orders.
    """

    def __init__(self, records: int, *, block: int, shuffle: bool, seed: int) -> None:
        self.records, self.block, self.shuffle, self.seed = records, block, shuffle, seed
        self._epoch = -1
        self._blocks: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, dtype=np.int64)
        self._starts: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, dtype=np.int64)

    def record(self, document: int) -> int:
        """The record that is document ``document``."""
        epoch, place = divmod(document, self.records)
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            self._enter(epoch)
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        block, inside = int(self._blocks[number]), place - int(self._starts[number])
        first = block * self.block
        size = min(self.block, self.records - first)
        if size > 1:
            inside = int(np.random.default_rng([self.seed, epoch, 1 + block]).permutation(size)[inside])
        return first + inside

    def _enter(self, epoch: int) -> None:
        count = -(-self.records // self.block)
        self._blocks = np.random.default_rng([self.seed, epoch, 0]).permutation(count)
        sizes = np.minimum(self.block, self.records - self._blocks * self.block)
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._epoch = epoch
