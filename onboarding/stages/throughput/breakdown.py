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
EMBEDDING, HEAD, UPDATE = "embedding and input", "head and loss", "norm, clipping and optimizer"
BETWEEN = "between blocks"
"""What of the step no other row counts."""


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
        self.reached: dict[int, Any] = {}
        """Where the gradient of the block's output was there."""
        self.left: Any = None
        """Where the gradient of the first block's input was there; None where it is not wanted."""
        self.parts: dict[int, list[tuple[str, Any, Any]]] = defaultdict(list)
        self._passed: Any = None

    def passed(self) -> None:
        """Forward and backward are done."""
        self._passed = self.clock.mark()

    @contextmanager
    def watching(self) -> Iterator[BlockTimes]:
        """Hooks stand while the context does."""
        handles = []
        for index, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(self._begin(index), with_kwargs=True))
            handles.append(block.register_forward_hook(self._end(index)))
            for name, child in block.named_children():
                begun: list[Any] = []
                handles.append(child.register_forward_pre_hook(self._part_begin(index, begun)))
                handles.append(child.register_forward_hook(self._part_end(index, part_of(name), begun)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            entered = _first(args, *kwargs.values())
            if index == 0 and entered is not None and entered.requires_grad:
                entered.register_hook(self._gradient_of_input)  # type: ignore[no-untyped-call]
            self.forward[index] = [self.clock.mark()]

        return hook

    def _end(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.forward[index].append(self.clock.mark())
            given = _first(output)
            if given is not None and given.requires_grad:
                given.register_hook(self._gradient_of_output(index))  # type: ignore[no-untyped-call]

        return hook

    def _gradient_of_output(self, index: int) -> Any:
        def hook(gradient: Tensor) -> None:
            self.reached[index] = self.clock.mark()

        return hook

    def _gradient_of_input(self, gradient: Tensor) -> None:
        self.left = self.clock.mark()

    def _part_begin(self, index: int, begun: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            # a recomputed block runs its children again in backward: that is not its forward pass
            begun[:] = [self.clock.mark()] if len(self.forward[index]) == 1 else []

        return hook

    def _part_end(self, index: int, part: str, begun: list[Any]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if begun:
                self.parts[index].append((part, begun[0], self.clock.mark()))

        return hook

    def table(self, labels: list[str], begin: Any, end: Any) -> list[dict[str, Any]]:
        """Rows by label and for what lies outside the blocks; together they are the whole step.

        Backward of a block lasts from the gradient of its output to that of the next block's, of the last one to that
        of the first block's input, or where nobody wants it to the end of the pass. What lies between two blocks in
        forward is a row of its own.

        Args:
            labels: of each block.
            begin: mark at the step's begin.
            end: mark at its end.
        """
        self.clock.wait()
        ms, last = self.clock.ms, len(self.blocks) - 1
        passed = self._passed if self._passed is not None else end
        rows: dict[str, dict[str, Any]] = {}
        backward = self._backward(begin, passed)
        for index, label in enumerate(labels):
            row = rows.setdefault(label, {"label": label, "layers": 0, "forward_ms": 0.0, "backward_ms": 0.0})
            row["layers"] += 1
            row["forward_ms"] += ms(*self.forward[index])
            row["backward_ms"] += backward.get(index, 0.0)
            parts = row.setdefault("parts", defaultdict(float))
            for part, one, other in self.parts[index]:
                parts[part] += ms(one, other)
        first_gradient = min((ms(begin, mark) for mark in self.reached.values()), default=ms(begin, passed))
        outside = [
            (EMBEDDING, ms(begin, self.forward[0][0]), 0.0 if self.left is None else ms(self.left, passed)),
            (HEAD, first_gradient - ms(begin, self.forward[last][1]), 0.0),
            (UPDATE, ms(passed, end), 0.0),
        ]
        known = sum(r["forward_ms"] + r["backward_ms"] for r in rows.values()) + sum(f + b for _, f, b in outside)
        outside.append((BETWEEN, ms(begin, end) - known, 0.0))
        return [*rows.values(), *({"label": label, "forward_ms": f, "backward_ms": b} for label, f, b in outside)]

    def _backward(self, begin: Any, passed: Any) -> dict[int, float]:
        """Milliseconds of each block that gradients reached, in whatever order they did."""
        at = sorted((self.clock.ms(begin, mark), index) for index, mark in self.reached.items())
        stop = self.clock.ms(begin, passed if self.left is None else self.left)
        ends = [*(time for time, _ in at[1:]), stop]
        return {index: until - time for (time, index), until in zip(at, ends, strict=True)}


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
