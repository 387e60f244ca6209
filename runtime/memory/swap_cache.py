"""Selective operator caching: recomputation that skips what was worth keeping.

A recomputed block runs again in backward. ``SwapCache`` keeps the results of chosen operators (matrix products, grouped
products, attention, a bundle's kernels) so that they need not: on the device up to a budget, beyond it in pinned host
memory, copied there on a side stream and brought back before the block's turn comes; what fits nowhere is recomputed
(a miss). The first pass measures each operator; from then on places go to the results that cost most time per byte,
and of these the ones that backward needs first stay on the device.

A result that is changed in place after it was kept counts as a miss: never a wrong value.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GIB = 1 << 30
Where = Literal["device", "host", "drop"]
Key = tuple[int, int]
"""Number of the block call within a pass (forward and backward of one microbatch), of the operator within it."""
NAMES = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
}
NAMESPACES = ("onboard", "flash_attn", "fla")
"""Every operator of a bundle or of a library of attention kernels counts as expensive."""


@dataclass(kw_only=True)
class Kept:
    """The results of one operator call."""

    name: str
    results: list[Any]
    """Tensors on the device or on the host, and what was no tensor."""
    watched: list[tuple[Tensor, int]]
    """Tensors that share the device's memory, and their versions when they were kept: a change in place raises them."""
    where: Where
    size: int
    single: bool = False
    """Whether the call gave one tensor and not several in a tuple or list."""
    ready: Any = None
    """Event after the copy to the host, or back."""
    promoted: bool = False


@dataclass(kw_only=True)
class Profile:
    """One operator call of the measured pass."""

    key: Key
    name: str
    size: int
    seconds: float
    events: Any = None


@dataclass(kw_only=True)
class Counts:
    """By operator name: what happened to its results."""

    kept: Counter[str] = field(default_factory=Counter)
    spilled: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    promoted: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def table(self) -> list[dict[str, Any]]:
        """One row an operator, for the log."""
        columns = ("kept", "spilled", "dropped", "hits", "promoted", "misses")
        names = sorted(set().union(*(getattr(self, c) for c in columns)))
        return [{"operator": n, **{c: getattr(self, c)[n] for c in columns}} for n in names]


class SwapCache:
    """The cache of one model: :meth:`contexts` goes to ``recompute_blocks``, :meth:`begin` comes before every pass.

    Args:
        device_bytes: budget on the device.
        host_bytes: budget of pinned host memory.
        device: where the model is; on a CPU both budgets are ordinary memory, which is how the policy is tested.
    """

    def __init__(self, device_bytes: int, host_bytes: int, device: torch.device) -> None:
        self.device_bytes, self.host_bytes, self.device = device_bytes, host_bytes, device
        self.used = {"device": 0, "host": 0}
        self.peak = {"device": 0, "host": 0}
        self.counts = Counts()
        self.plan: dict[Key, Where] | None = None
        self._profile: list[Profile] = []
        self._asked: set[Key] = set()
        """What recomputation wanted in the measured pass: it stops early, so a block's last product is not."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._blocks: dict[int, dict[int, Kept]] = {}
        self._block = -1
        self._passes = 0

    # ---- the pass -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a pass: what is left of the last one is freed; after the first one the plan is made."""
        for number in list(self._blocks):
            self._free(number)
        self._block = -1
        self._passes += 1
        if self._passes == 2 and self.plan is None:
            self.plan = self.make_plan([p for p in self._profile if p.key in self._asked])
            self._profile = []

    def contexts(self) -> tuple[_Keep, _Reuse]:
        """For one call of one block: the context of its forward pass and that of its recomputation."""
        self._block += 1
        self._blocks[self._block] = {}
        return _Keep(self, self._block), _Reuse(self, self._block)

    def make_plan(self, profile: list[Profile]) -> dict[Key, Where]:
        """Places by measured time per byte; among the chosen, the last to be made stay on the device."""
        for p in profile:
            if p.events is not None:
                p.events[1].synchronize()
                p.seconds = p.events[0].elapsed_time(p.events[1]) / 1e3
        plan: dict[Key, Where] = {p.key: "drop" for p in profile}
        chosen, room = [], self.device_bytes + self.host_bytes
        for p in sorted(profile, key=lambda p: p.seconds / max(p.size, 1), reverse=True):
            if p.size <= room:
                chosen.append(p)
                room -= p.size
        device = self.device_bytes
        for p in sorted(chosen, key=lambda p: p.key, reverse=True):  # backward comes to the last block first
            plan[p.key] = "device" if p.size <= device else "host"
            device -= p.size if plan[p.key] == "device" else 0
        return plan

    # ---- forward ------------------------------------------------------------------------------------------------

    def place(self, key: Key, size: int) -> Where:
        """Where the results of a call go: by the plan, and never beyond a budget."""
        wish: Where = "device" if self.plan is None else self.plan.get(key, "drop")
        if wish == "device" and self.used["device"] + size > self.device_bytes:
            wish = "host"
        if wish == "host" and self.used["host"] + size > self.host_bytes:
            wish = "drop"
        return wish

    def keep(self, key: Key, name: str, results: Any) -> None:
        """Offer the results of one call."""
        single = isinstance(results, Tensor)
        values = [results] if single else list(results)
        tensors = [v for v in values if isinstance(v, Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        where = self.place(key, size)
        if where == "drop":
            self.counts.dropped[name] += 1
            return
        held = [v.detach() if isinstance(v, Tensor) else v for v in values]
        kept = Kept(name=name, results=held, watched=[], where=where, size=size, single=single)
        if where == "host":
            self._spill(kept)
            self.counts.spilled[name] += 1
        else:
            kept.watched = [(t, t._version) for t in tensors]
            self.counts.kept[name] += 1
        self._account(where, size)
        self._blocks[key[0]][key[1]] = kept

    def _spill(self, kept: Kept) -> None:
        with self._beside() as event:
            kept.results = [self._to_host(v) if isinstance(v, Tensor) else v for v in kept.results]
        kept.ready = event

    def settle(self) -> None:
        """Something is changed in place: let the copies to the host that are under way end first."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_recompute(self, block: int) -> None:
        """A block is about to run again: fetch its spilled results, and those of the block before it."""
        for number in (block, block - 1):
            for kept in self._blocks.get(number, {}).values():
                if kept.where == "host" and not kept.promoted:
                    self._promote(kept)

    def take(self, key: Key, name: str) -> Any:
        """The kept result of a call (a list where it gave several tensors), or None: a miss."""
        if self.plan is None:
            self._asked.add(key)
        kept = self._blocks.get(key[0], {}).pop(key[1], None)
        if kept is None:
            self.counts.misses[name] += 1
            return None
        self._account(kept.where, -kept.size)
        changed = any(t._version != version for t, version in kept.watched)
        if changed or kept.name != name:
            self.counts.misses[name] += 1
            return None
        if kept.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.ready)
        if kept.promoted:
            self.counts.promoted[name] += 1
        self.counts.hits[name] += 1
        return kept.results[0] if kept.single else kept.results

    def end_recompute(self, block: int) -> None:
        """The block has run again: whatever it did not ask for is freed."""
        self._free(block)

    def _promote(self, kept: Kept) -> None:
        if kept.ready is not None and self._stream is not None:
            self._stream.wait_event(kept.ready)
        with self._beside() as event:
            kept.results = [self._to_device(v) if isinstance(v, Tensor) else v for v in kept.results]
        kept.ready, kept.promoted = event, True

    def _free(self, block: int) -> None:
        for kept in self._blocks.pop(block, {}).values():
            self._account(kept.where, -kept.size)

    # ---- memory -------------------------------------------------------------------------------------------------

    def _account(self, where: str, size: int) -> None:
        self.used[where] += size
        self.peak[where] = max(self.peak[where], self.used[where])

    @contextmanager
    def _beside(self) -> Iterator[Any]:
        """On the side stream, after what the main one has queued so far; gives the event of its end."""
        if self._stream is None:
            yield None
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield event
            event.record(self._stream)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        value = tensor.to(self.device, non_blocking=True)
        value.record_stream(torch.cuda.current_stream(self.device))
        return value


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Forward: offers results to the cache, and measures operators in the first pass."""

    def __init__(self, cache: SwapCache, block: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.block, self.number = cache, block, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.cache.settle()
        if not wanted(func):
            return func(*args, **kwargs)
        key, self.number = (self.block, self.number), self.number + 1
        name = func._schema.name
        if self.cache.plan is None:
            results = self._measured(key, name, func, args, kwargs)
        else:
            results = func(*args, **kwargs)
        self.cache.keep(key, name, results)
        return results

    def _measured(self, key: Key, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        events = None
        if self.cache.device.type == "cuda":
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[0].record()
        begun = time.perf_counter()
        results = func(*args, **kwargs)
        seconds = time.perf_counter() - begun
        if events is not None:
            events[1].record()
        values = results if isinstance(results, (tuple, list)) else [results]
        size = sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
        self.cache._profile.append(Profile(key=key, name=name, size=size, seconds=seconds, events=events))
        return results


class _Reuse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recomputation: hands out what was kept."""

    def __init__(self, cache: SwapCache, block: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.block, self.number = cache, block, 0

    def __enter__(self) -> Any:
        self.cache.begin_recompute(self.block)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.cache.end_recompute(self.block)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not wanted(func):
            return func(*args, **kwargs)
        key, self.number = (self.block, self.number), self.number + 1
        kept = self.cache.take(key, func._schema.name)
        return func(*args, **kwargs) if kept is None else kept


def wanted(func: Any) -> bool:
    """Whether an operator's results are worth keeping."""
    name: str = func._schema.name
    return (name in NAMES or name.partition("::")[0] in NAMESPACES) and not func._schema.is_mutable
