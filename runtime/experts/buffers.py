"""A ring of communication buffers of fixed size: sending does not fragment the allocator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lease:
    """A tensor in a slot of the ring; give it back when the collective that reads it has been waited for."""

    tensor: Tensor
    give_back: Callable[[], None]


class RingPool:
    """``slots`` buffers of ``slot_bytes``, taken in turn.

    A request that is larger, or that finds every slot taken, gets memory of its own and is counted in ``misses``.
    On a GPU a slot is used again only behind the wait for its collective on the same stream, so no event is needed.
    """

    def __init__(self, slots: int = 4, slot_bytes: int = 0) -> None:
        """
        Args:
            slots: buffers in the ring; two hops with chunks keep up to four at once.
            slot_bytes: of one buffer, from the plan; 0 lets the first requests size the ring.
        """
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.misses = 0
        self.takes = 0
        self._buffers: list[Tensor | None] = [None] * slots
        self._taken = [False] * slots
        self._next = 0

    @property
    def bytes(self) -> int:
        """Held now."""
        return sum(b.numel() for b in self._buffers if b is not None)

    def take(self, shape: tuple[int, ...], like: Tensor) -> Lease:
        """A buffer of ``shape`` with dtype and device of ``like``; its content is left over from earlier use."""
        self.takes += 1
        size = math.prod(shape) * like.element_size()
        slot = self._next
        fake = type(like) is not Tensor or like.device.type == "meta"
        if fake or self._taken[slot] or (self.slot_bytes and size > self.slot_bytes):
            self.misses += not fake
            return Lease(like.new_empty(shape), lambda: None)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < size or buffer.device != like.device:
            buffer = torch.empty(max(size, self.slot_bytes), dtype=torch.uint8, device=like.device)
            self._buffers[slot] = buffer
        self._taken[slot] = True
        self._next = (slot + 1) % self.slots

        def give_back() -> None:
            self._taken[slot] = False

        return Lease(buffer[:size].view(like.dtype).view(shape), give_back)

    def fill(self, value: float) -> None:
        """Overwrite every buffer, for tests that leftovers are never read."""
        for buffer in self._buffers:
            if buffer is not None:
                whole = buffer[: buffer.numel() // 4 * 4].view(torch.float32)
                whole.fill_(value)
