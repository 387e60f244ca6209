"""Selective operator caching: recomputation that skips what was worth keeping.

A recomputed block runs again in backward. ``SwapCache`` keeps the results of chosen operators (matrix products, grouped
products, attention, a bundle's kernels) so that they need not: on the device up to a budget, beyond it in pinned host
memory, copied there on a side stream and brought back before the block's turn comes; what fits nowhere is recomputed
(a miss). One pass measures each operator (on a GPU the second: the first one compiles); from then on places go to the
results that cost most time per byte, of these the ones that backward needs first stay on the device, and to the host
goes no more than the link carries while the passes run: waiting for it would cost more than recomputation.

Peak memory: the results of the last block cost nothing, since its recomputation would make them at that very moment.
Those of the block before are fetched when backward has left the feed-forward half of the block after it, so they lie
where that half's activations were (:meth:`SwapCache.watch`).

A result that is changed in place after it was kept counts as a miss: never a wrong value.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.memory import intercept

GIB = 1 << 30
Where = Literal["device", "host", "drop"]
Key = tuple[int, int]
"""Number of the block call within a pass (forward and backward of one microbatch), of the operator within it."""
NAMES = (
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
)
NAMESPACES = ("onboard", "flash_attn", "fla")
"""Every operator of a bundle or of a library of attention kernels counts as expensive."""


@dataclass(kw_only=True)
class Kept:
    """The results of one operator call."""

    name: str
    results: list[Any]
    """Tensors on the device or on the host, and what was no tensor."""
    watched: list[tuple[Tensor, int]]
    """Tensors that share the device's memory, and their versions when they were kept: a change in place raises them.
    Of a spilled result until its block has run."""
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
        self._link = link_rate(device) if device.type == "cuda" else math.inf
        self._clock: list[tuple[int, Any]] = []
        """Of the measured pass: (-1, its begin), then (block, begin of its recomputation)."""
        self._blocks: dict[int, dict[int, Kept]] = {}
        self._block = -1
        self._running: int | None = None
        """The block whose forward runs, until its first half has run."""
        self._watched = False
        self._passes = 0
        self._measured_pass = 2 if device.type == "cuda" else 1

    # ---- the pass -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a pass: what is left of the last one is freed; after the first one the plan is made."""
        for number in list(self._blocks):
            self._free(number)
        self._block = -1
        self._passes += 1
        if self._passes == 1:
            intercept.cover([*NAMES, *intercept.operators_of(NAMESPACES)])
        if self._passes == self._measured_pass + 1 and self.plan is None:
            self.plan = self.make_plan([p for p in self._profile if p.key in self._asked], self._windows())
            self._profile, self._clock = [], []
        if self.measuring:
            self._clock.append((-1, self._now()))

    @property
    def measuring(self) -> bool:
        """Whether this pass is the one that is measured; nothing is kept in it or before it."""
        return self.plan is None and self._passes == self._measured_pass

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Fetch ahead when backward leaves a block's second half; without this, when it enters the block."""
        self._watched = True
        for block in blocks:
            for child in block.children():
                if any(p.ndim > 1 for p in child.parameters()):
                    child.register_forward_hook(self._half)

    def contexts(self) -> tuple[_Keep, _Reuse]:
        """For one call of one block: the context of its forward pass and that of its recomputation."""
        self._block += 1
        self._blocks[self._block] = {}
        self._running = self._block
        return _Keep(self, self._block), _Reuse(self, self._block)

    def make_plan(self, profile: list[Profile], windows: dict[int, float] | None = None) -> dict[Key, Where]:
        """Places by measured time per byte; among the chosen, the last to be made stay on the device.

        Args:
            profile: one row a call.
            windows: bytes that the link carries back in time for each block, and under -1 to the host in forward;
                None where it is never in the way.
        """
        for p in profile:
            if p.events is not None:
                p.events[1].synchronize()
                p.seconds = p.events[0].elapsed_time(p.events[1]) / 1e3
        plan: dict[Key, Where] = {p.key: "drop" for p in profile}
        room = _Room(self.device_bytes, self.host_bytes, windows or {})
        by_worth = sorted(profile, key=lambda p: p.seconds / max(p.size, 1), reverse=True)
        chosen = [p for p in by_worth if room.host(p) or room.device(p)]
        room = _Room(self.device_bytes, self.host_bytes, windows or {})
        for p in sorted(chosen, key=lambda p: p.key, reverse=True):  # backward comes to the last block first
            if room.device(p):
                plan[p.key] = "device"
        for p in by_worth:
            if plan[p.key] == "drop":
                plan[p.key] = "host" if room.host(p) else "device" if room.device(p) else "drop"
        return plan

    def _windows(self) -> dict[int, float] | None:
        """From the measured pass. A block's results come back while the one after it runs backward through a half."""
        if self._stream is None or len(self._clock) < 2:
            return None
        self._clock[-1][1].synchronize()
        begun = self._clock[0][1]
        at = [(block, begun.elapsed_time(event) / 1e3) for block, event in self._clock[1:]]
        found = {-1: self._link * at[0][1]}
        for (block, start), (_, end) in pairwise(at):
            found[block - 1] = self._link * (end - start) / 2
        found[at[0][0]] = 0.0  # the first to run backward has no time at all
        return found

    def _now(self) -> Any:
        """An event on a GPU; elsewhere nothing waits for a link."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ---- forward ------------------------------------------------------------------------------------------------

    def place(self, key: Key, size: int) -> Where:
        """Where the results of a call go: by the plan, and never beyond a budget."""
        wish: Where = "drop" if self.plan is None else self.plan.get(key, "drop")
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
        watched = [(t, t._version) for t in tensors]
        kept = Kept(name=name, results=held, watched=watched, where=where, size=size, single=single)
        if where == "host":
            self._spill(kept)
            self.counts.spilled[name] += 1
        else:
            self.counts.kept[name] += 1
        self._account(where, size)
        self._blocks[key[0]][key[1]] = kept

    def _spill(self, kept: Kept) -> None:
        with self._beside() as event:
            kept.results = [self._to_host(v) if isinstance(v, Tensor) else v for v in kept.results]
        kept.ready = event

    def end_forward(self, block: int) -> None:
        """The block has run: what was changed in place since it was spilled may have been copied after the change."""
        kept = self._blocks.get(block, {})
        for number, one in list(kept.items()):
            if one.where == "host" and any(t._version != version for t, version in one.watched):
                self._account("host", -one.size)
                del kept[number]
            elif one.where == "host":
                one.watched = []

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_recompute(self, block: int) -> None:
        """A block is about to run again: fetch its spilled results that nobody fetched yet."""
        if self.measuring:
            self._clock.append((block, self._now()))
        self._fetch(block)
        if not self._watched:
            self._fetch(block - 1)

    def _half(self, module: nn.Module, args: Any, output: Any) -> None:
        """A part of a block has run; the gradient of the first one's output is when to fetch the block before."""
        block, first = self._running, output[0] if isinstance(output, (tuple, list)) else output
        if block is None or not isinstance(first, Tensor) or not first.requires_grad:
            return
        self._running = None
        first.register_hook(lambda gradient: self._fetch(block - 1))  # type: ignore[no-untyped-call]

    def _fetch(self, block: int) -> None:
        for kept in self._blocks.get(block, {}).values():
            if kept.where == "host" and not kept.promoted:
                self._promote(kept)

    def take(self, key: Key, name: str) -> Any:
        """The kept result of a call (a list where it gave several tensors), or None: a miss."""
        if self.measuring:
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
        # memory of the main stream: what backward has freed there can be taken at once
        places = [self._place(v) if isinstance(v, Tensor) else v for v in kept.results]
        with self._beside() as event:
            pairs = zip(kept.results, places, strict=True)
            kept.results = [self._to_device(v, to) if isinstance(v, Tensor) else v for v, to in pairs]
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

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor if self._stream is None else torch.empty_like(tensor, device=self.device, pin_memory=False)

    def _to_device(self, tensor: Tensor, place: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        place.copy_(tensor, non_blocking=True)
        place.record_stream(self._stream)
        return place


class _Room:
    """What is left of the budgets, and of what the link carries in time for each block."""

    def __init__(self, device: int, host: int, windows: dict[int, float]) -> None:
        self._device, self._windows = device, dict(windows)
        self._host = min(host, windows.get(-1, host))

    def device(self, p: Profile) -> bool:
        """Take room on the device, if there is enough."""
        fits = p.size <= self._device
        self._device -= p.size if fits else 0
        return fits

    def host(self, p: Profile) -> bool:
        """Take room on the host, and time of the link."""
        window = self._windows.get(p.key[0], math.inf)
        fits = p.size <= min(self._host, window)
        if fits:
            self._host -= p.size
            self._windows[p.key[0]] = window - p.size
        return fits


class _Keep(AbstractContextManager[None]):
    """Forward: offers results to the cache, and measures operators in the measured pass."""

    def __init__(self, cache: SwapCache, block: int) -> None:
        self.cache, self.block, self.number = cache, block, 0

    def __enter__(self) -> None:
        intercept.enter(self)

    def __exit__(self, *error: Any) -> None:
        intercept.leave()
        self.cache.end_forward(self.block)

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        key, self.number = (self.block, self.number), self.number + 1
        results = self._measured(key, name, run) if self.cache.measuring else run()
        self.cache.keep(key, name, results)
        return results

    def _measured(self, key: Key, name: str, run: Callable[[], Any]) -> Any:
        events = None
        if self.cache.device.type == "cuda":
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            events[0].record()
        begun = time.perf_counter()
        results = run()
        seconds = time.perf_counter() - begun
        if events is not None:
            events[1].record()
        values = results if isinstance(results, (tuple, list)) else [results]
        size = sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
        self.cache._profile.append(Profile(key=key, name=name, size=size, seconds=seconds, events=events))
        return results


class _Reuse(AbstractContextManager[None]):
    """Recomputation: hands out what was kept."""

    def __init__(self, cache: SwapCache, block: int) -> None:
        self.cache, self.block, self.number = cache, block, 0

    def __enter__(self) -> None:
        self.cache.begin_recompute(self.block)
        intercept.enter(self)

    def __exit__(self, *error: Any) -> None:
        intercept.leave()
        self.cache.end_recompute(self.block)

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        key, self.number = (self.block, self.number), self.number + 1
        kept = self.cache.take(key, name)
        return run() if kept is None else kept


def link_rate(device: torch.device) -> float:
    """Bytes a second between a GPU and pinned host memory, measured on 64 MiB; the slower direction."""
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device, pin_memory=False)
    slowest = 0.0
    for to, source in ((there, host), (host, there)):
        to.copy_(source, non_blocking=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        slowest = max(slowest, begin.elapsed_time(end) / 1e3)
    return host.numel() / slowest
