"""Times one training step block by block, forward and backward, by hooks: on a GPU with events, else by the clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PARTS = {
    "mixer": ("attn", "attention", "mixer", "mamba", "conv", "recurrent", "temporal"),
    "feed-forward": ("mlp", "feed_forward", "feedforward", "moe", "experts", "ffn"),
    "norms": ("norm", "ln_"),
}
"""Part of a block -> words in the names of its children; the first part that fits counts."""


class Clock:
    """Marks in time on one device, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device

    def mark(self) -> Any:
        """Now; on a GPU the moment at which the work queued so far will be done."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Between two marks; on a GPU both must have been reached."""
        return float(begin.elapsed_time(end)) if self.cuda else 1e3 * (end - begin)

    def wait(self) -> None:
        """Until everything queued is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


class BlockTimes:
    """Marks of one step.

    Args:
        blocks: of the model, in order.
        clock: of the model's device.
    """

    def __init__(self, blocks: list[nn.Module], clock: Clock) -> None:
        self.blocks, self.clock = blocks, clock
        self.forward: dict[int, list[Any]] = defaultdict(list)
        self.backward: dict[int, list[Any]] = {}
        """[where the gradient of the block's output was there, where that of its input was]."""
        self.parts: dict[int, list[tuple[str, Any, Any]]] = defaultdict(list)

    @contextmanager
    def watching(self) -> Iterator[BlockTimes]:
        """Hooks stand while the context does."""
        handles = []
        for index, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(self._begin(index), with_kwargs=True))
            handles.append(block.register_forward_hook(self._end(index)))
            for name, child in block.named_children():
                begun: list[Any] = []
                handles.append(child.register_forward_pre_hook(self._part_begin(begun)))
                handles.append(child.register_forward_hook(self._part_end(index, part_of(name), begun)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered = _first(args, *kwargs.values())
            if entered is not None and entered.requires_grad:
                entered.register_hook(self._gradient(index, 1))  # type: ignore[no-untyped-call]
            self.forward[index] = [self.clock.mark()]

        return hook

    def _end(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.forward[index].append(self.clock.mark())
            left = _first(output)
            if left is not None and left.requires_grad:
                left.register_hook(self._gradient(index, 0))  # type: ignore[no-untyped-call]

        return hook

    def _gradient(self, index: int, place: int) -> Any:
        def hook(gradient: Tensor) -> None:
            self.backward.setdefault(index, [None, None])[place] = self.clock.mark()

        return hook

    def _part_begin(self, begun: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            begun[:] = [self.clock.mark()]

        return hook

    def _part_end(self, index: int, part: str, begun: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if begun:
                self.parts[index].append((part, begun[0], self.clock.mark()))

        return hook

    def table(self, labels: list[str], begin: Any, end: Any) -> list[dict[str, Any]]:
        """Rows by label and for what lies outside the blocks; together they are the whole step.

        Args:
            labels: of each block.
            begin: mark at the step's begin.
            end: mark at its end.
        """
        self.clock.wait()
        ms, last = self.clock.ms, len(self.blocks) - 1
        rows: dict[str, dict[str, Any]] = {}
        for index, label in enumerate(labels):
            row = rows.setdefault(label, {"label": label, "layers": 0, "forward_ms": 0.0, "backward_ms": 0.0})
            row["layers"] += 1
            row["forward_ms"] += ms(*self.forward[index])
            reached, passed = self.backward.get(index, [None, None])
            if reached is not None and passed is not None:
                row["backward_ms"] += ms(reached, passed)
            parts = row.setdefault("parts", defaultdict(float))
            for part, one, other in self.parts[index]:
                parts[part] += ms(one, other)
        entry = ms(begin, self.forward[0][0])
        gradient_of_last = self.backward.get(last, [None])[0]
        head = ms(self.forward[last][1], gradient_of_last) if gradient_of_last is not None else 0.0
        known = entry + head + sum(r["forward_ms"] + r["backward_ms"] for r in rows.values())
        rest = max(0.0, ms(begin, end) - known)
        outside = (("embedding and input", entry), ("head and loss", head), ("norm, clipping and optimizer", rest))
        return [*rows.values(), *({"label": label, "forward_ms": t, "backward_ms": 0.0} for label, t in outside)]


def part_of(name: str) -> str:
    """Part of a block that a child's name tells."""
    found = (part for part, words in PARTS.items() if any(word in name.lower() for word in words))
    # ``post_attention_layernorm`` is a norm, whatever it follows
    return "norms" if "norm" in name.lower() else next(found, "other")


def _first(*values: Any) -> Tensor | None:
    """The first floating tensor among arguments or results."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        if isinstance(value, (tuple, list)) and (inner := _first(*value)) is not None:
            return inner
    return None
