"""Marked functions that loop over the sequence in plain torch (Mamba and kin): measured short, extended to full length.

Their loops run one step a token, so at a published sequence length they would be a hundred thousand operators. Two
short traces give the shapes and costs of every call; both grow linearly with the length, so two points are enough.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from onboarding.stages.parse.cost import tensors_of
from onboarding.stages.parse.growth import law
from onboarding.stages.parse.leaves import LeafCall, run_leaf
from onboarding.stages.parse.marked import MarkedFunction

PROBE_LENGTHS = (16, 32)

Key = tuple[str, str, int]
"""Module path, function name, and which of the module's calls of it."""


def loops(function: Callable[..., Any]) -> bool:
    """Whether the source of a marked function holds a loop, or its mark says so."""
    if isinstance(told := getattr(function, "loops", None), bool):
        return told
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.For | ast.While) for node in ast.walk(tree))


@dataclass(kw_only=True)
class ScanCall:
    """One call seen at a probe length."""

    outputs: list[tuple[tuple[int, ...], torch.dtype] | None]
    structure: Any
    costs: dict[str, list[float]]
    """Phase -> operators, FLOPs, bytes."""


class ScanProbe:
    """Wraps marked functions during a short trace and notes each outermost call."""

    def __init__(self, tracer: Any, looping: set[tuple[Any, str]]) -> None:
        self.tracer = tracer
        self.looping = looping
        self.calls: dict[Key, ScanCall] = {}
        self._inside = False
        self._counts: Counter[tuple[str, str]] = Counter()

    def wrap(self, marked: MarkedFunction) -> Callable[..., Any] | None:
        """A replacement that runs a looping function under a path of its own."""
        if (marked.module, marked.attribute) not in self.looping:
            return None

        def probe(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return marked.function(*args, **kwargs)
            path = self.tracer.path
            key = (path, marked.attribute, self._counts[path, marked.attribute])
            self._counts[path, marked.attribute] += 1
            self._inside = True
            try:
                with self.tracer.under(_tag(key)):
                    outputs = marked.function(*args, **kwargs)
            finally:
                self._inside = False
            leaves, structure = tree_flatten(outputs)
            shapes = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in leaves]
            self.calls[key] = ScanCall(outputs=shapes, structure=structure, costs={})
            return outputs

        return probe

    def settle(self) -> dict[Key, ScanCall]:
        """Add up what ran under each call."""
        tags = {_tag(key): call for key, call in self.calls.items()}
        for operation in self.tracer.trace.operations:
            call = tags.get(operation.path)
            if call is not None:
                total = call.costs.setdefault(operation.phase, [0.0, 0.0, 0.0])
                for index, value in enumerate((1.0, operation.flops, operation.bytes_moved)):
                    total[index] += value
        return self.calls


def _tag(key: Key) -> str:
    return f"{key[0]}#{key[1]}#{key[2]}"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Two probes of the same model, the second twice as long."""

    short: dict[Key, ScanCall]
    long: dict[Key, ScanCall]

    def at(
        self, key: Key, tokens: int
    ) -> tuple[list[tuple[tuple[int, ...], torch.dtype] | None], Any, dict[str, list[float]]]:
        """Output shapes, their structure, and costs of a call at a length.

        Raises:
            KeyError: the probes never saw this call.
        """
        a, b = self.short[key], self.long[key]
        ratio = (tokens - PROBE_LENGTHS[0]) / (PROBE_LENGTHS[1] - PROBE_LENGTHS[0])
        shapes = [
            None
            if x is None or y is None
            else (tuple(round(p + (q - p) * ratio) for p, q in zip(x[0], y[0], strict=True)), x[1])
            for x, y in zip(a.outputs, b.outputs, strict=True)
        ]
        zero = [0.0, 0.0, 0.0]
        costs = {
            phase: [
                law(p, q, PROBE_LENGTHS[1]).at(tokens)
                for p, q in zip(a.costs.get(phase, zero), b.costs.get(phase, zero), strict=True)
            ]
            for phase in ("forward", "backward")
        }
        return shapes, a.structure, costs


class ScanLeaves:
    """Replacements for marked loops in the full-length trace."""

    def __init__(self, tracer: Any, growth: Growth, tokens: int) -> None:
        self.tracer, self.growth, self.tokens = tracer, growth, tokens
        self._counts: Counter[tuple[str, str]] = Counter()

    def wrap(self, marked: MarkedFunction) -> Callable[..., Any]:
        """A replacement that allocates the outputs and records the extended cost."""

        def scan(*args: Any, **kwargs: Any) -> Any:
            path = self.tracer.path
            key = (path, marked.attribute, self._counts[path, marked.attribute])
            self._counts[path, marked.attribute] += 1
            shapes, structure, costs = self.growth.at(key, self.tokens)
            inputs = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
            call = LeafCall(
                kind="scan",
                name=marked.kernel,
                shapes=tuple(tuple(t.shape) for t in inputs),
                flops=costs["forward"][1],
                backward_flops=costs["backward"][1],
                bytes_moved=costs["forward"][2],
                backward_bytes=costs["backward"][2],
                facts={"operators": costs["forward"][0] + costs["backward"][0], "marked": marked},
            )

            def make() -> tuple[torch.Tensor, ...]:
                return tuple(inputs[0].new_empty(s[0], dtype=s[1]) for s in shapes if s is not None)

            made = iter(run_leaf(self.tracer, call, make, *inputs))
            return tree_unflatten([None if s is None else next(made) for s in shapes], structure)

        return scan
