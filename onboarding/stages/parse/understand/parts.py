"""The parts of a decoder layer, told apart by what they do: norms, mixers, feed-forwards, the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onboarding.stages.parse.roles import is_norm
from onboarding.stages.parse.understand.compare import same
from onboarding.stages.parse.understand.observe import Call, Observation, under

PROBES = (0, 3, 21)
"""Positions of the sequence that are disturbed."""


@dataclass(eq=False)
class Part:
    """One part of a layer."""

    path: str
    call: Call
    role: str
    """``norm``, ``mixer``, ``feed-forward`` or ``other``."""
    moves: Reach | None = None
    delta: Tensor | None = None
    """What it adds, where it adds it to the stream itself."""

    @property
    def module(self) -> Any:
        """The module itself."""
        return self.call.function

    @property
    def input(self) -> Tensor:
        """The hidden states that it reads."""
        return hidden(self.call)

    @property
    def output(self) -> Tensor:
        """The hidden states that it gives back, without a stream that it added them to."""
        return self.call.results()[0] if self.delta is None else self.delta


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Which outputs moved when one input position did."""

    future: bool
    """An output before the disturbed position moved: not causal."""
    extent: int
    """Largest number of positions, the disturbed one among them, over which it was felt."""
    unbounded: bool
    """It was felt until the end of the sequence."""

    @property
    def mixes(self) -> bool:
        """Whether positions see each other at all."""
        return self.future or self.extent > 1


@dataclass
class LayerView:
    """A decoder layer of the twin."""

    index: int
    path: str
    call: Call
    parts: list[Part] = field(default_factory=list)

    def of(self, role: str) -> list[Part]:
        """Its parts of one role, in order."""
        return [part for part in self.parts if part.role == role]


def hidden(call: Call) -> Tensor:
    """The hidden states among a call's arguments: its first floating tensor of three or more dims."""
    found = [t for t in call.tensors() if t.is_floating_point() and t.dim() >= 3]
    return found[0] if found else next(t for t in call.tensors() if t.is_floating_point())


def reach(call: Call, tokens: int) -> Reach:
    """Disturb single positions of a module's input and see which outputs move.

    Raises:
        Exception: what the module raises when it runs alone.
    """
    x = hidden(call)
    if x.dim() < 3 or x.shape[1] != tokens:
        return Reach(future=False, extent=1, unbounded=False)
    generator = torch.Generator().manual_seed(5)
    future, extent, unbounded = False, 1, False
    with torch.no_grad():
        base = first_tensor(call.again({}))
        if base.shape[:2] != x.shape[:2]:
            return Reach(future=False, extent=1, unbounded=False)
        for position in PROBES:
            moved = x.detach().clone()
            noise = torch.randn(moved[:, position].shape, generator=generator, dtype=moved.dtype)
            moved[:, position] += noise * moved.std()
            difference = (first_tensor(call.again({id(x): moved})) - base).abs().flatten(2).amax(-1)
            felt = (difference > 1e-6 * base.abs().max()).any(0).nonzero().flatten()
            if len(felt) == 0:
                continue
            future = future or bool(felt[0] < position)
            extent = max(extent, int(felt[-1]) - position + 1)
            unbounded = unbounded or (position < tokens // 4 and bool(felt[-1] == tokens - 1))
    return Reach(future=future, extent=extent, unbounded=unbounded)


def first_tensor(output: Any) -> Tensor:
    """The first tensor of what a module gave back."""
    return next(t for t in tree_leaves(output) if isinstance(t, Tensor))


def view_layer(observation: Observation, path: str, index: int) -> LayerView:
    """Tell a layer's parts apart."""
    call = observation.module(path)
    assert call is not None
    view = LayerView(index, path, call)
    _collect(observation, path, view)
    return view


def _collect(observation: Observation, path: str, view: LayerView) -> None:
    for call in _children(observation, path):
        module: Any = call.function
        if not [t for t in call.tensors() if t.is_floating_point()] or not call.results():
            continue
        if is_norm(module):
            view.parts.append(Part(call.path, call, "norm"))
        elif _is_block(observation, call):
            _collect(observation, call.path, view)
        else:
            view.parts.append(_part(observation, call))


def _children(observation: Observation, path: str) -> list[Call]:
    """Calls of the outermost modules that ran inside a module, in order."""
    found: list[Call] = []
    inside = [c for c in observation.inside(path, "module") if c.path != path]
    for call in inside:
        if not any(under(call.path, f.path) and call.path != f.path for f in found):
            found.append(call)
    return found


def _is_block(observation: Observation, call: Call) -> bool:
    """A part that holds a norm of its own input and a mixer or feed-forward behind it is a block inside the layer."""
    children = _children(observation, call.path)
    if len(children) < 2 or not is_norm(_module(children[0])):
        return False
    x = hidden(call)
    first = hidden(children[0])
    rest = [c for c in children[1:] if not is_norm(_module(c))]
    deep = any(_deep(_module(c)) for c in rest)
    return deep and first.shape == x.shape and same(first, x)


def _module(call: Call) -> Any:
    return call.function


def _deep(module: nn.Module) -> bool:
    """Holds two matrices or more: a feed-forward or a mixer, not a single projection."""
    return sum(p.dim() >= 2 for p in module.parameters()) >= 2


def _part(observation: Observation, call: Call) -> Part:
    module: Any = call.function
    tokens = observation.ids.shape[1]
    try:
        moves = reach(call, tokens)
    except Exception:  # the module does not run alone (it reads state that the layer made): then by what it called
        moves = None
    # attention over what another layer made (keys and values of its own it has none) moves nothing of its input
    mixes = bool(moves and moves.mixes) or bool(observation.during(call, "attention"))
    x, y = hidden(call), call.results()[0]
    if mixes and _deep(module):
        role = "mixer"
    elif sum(p.dim() >= 2 for p in module.parameters()) >= 2 and y.shape[-1] == x.shape[-1]:
        role = "feed-forward"
    else:
        role = "other"
    return Part(call.path, call, role, moves, _delta(observation, call))


def _delta(observation: Observation, call: Call) -> Tensor | None:
    """The last projection's output, where the module adds it to another of its arguments and gives back the sum."""
    y = call.results()[0]
    streams = [t for t in call.tensors() if t.shape == y.shape and t.is_floating_point()]
    for linear in reversed(observation.during(call, "linear")):
        made = linear.output
        if made.numel() == y.numel():
            return next((made for t in streams if same(made.reshape(y.shape) + t, y)), None)
    return None
