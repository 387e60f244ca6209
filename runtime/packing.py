"""Documents of one row do not see each other: proven on the model at hand, and arranged where its code does not.

Attention of transformers keeps documents apart by positions that restart. Linear attention, state spaces and short
convolutions mostly do not, so the modules that leak are found by a probe and then run document by document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from runtime.model import blocks
from runtime.refusal import Refused

NOISE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Relative change of one token's vector that rounding alone may cause (another grouping of expert tokens): far below
what a state, or a convolution that reaches over the border, does to a document's first tokens."""
PROBE = (11, 7)
"""Tokens of the probe's two documents."""


class Boundaries:
    """Where documents begin in the rows that the model is about to see. One per model, set before every forward."""

    def __init__(self) -> None:
        self.groups: list[Tensor] | None = None
        self.inverse: Tensor | None = None

    def set(self, lengths: Sequence[Sequence[int]], device: torch.device) -> None:
        """Group the documents of all rows by length, so that each group is one padded batch.

        Args:
            lengths: tokens of each document of each row.
            device: where the model is.
        """
        self.groups = self.inverse = None
        if all(len(row) == 1 for row in lengths):
            return
        by_size: dict[int, list[tuple[int, int]]] = {}
        start = 0
        for length in (n for row in lengths for n in row):
            by_size.setdefault(1 << (length - 1).bit_length(), []).append((start, length))
            start += length
        groups, order, base = [], torch.empty(start, dtype=torch.long), 0
        for members in by_size.values():
            longest = max(length for _, length in members)
            index = torch.zeros(len(members), longest, dtype=torch.long)
            for row, (begin, length) in enumerate(members):
                index[row, :length] = torch.arange(begin, begin + length)
                index[row, length:] = begin + length - 1  # what stands after a document's end does not count
                order[begin : begin + length] = base + row * longest + torch.arange(length)
            groups.append(index.to(device))
            base += index.numel()
        self.groups, self.inverse = groups, order.to(device)


def isolate(module: nn.Module, boundaries: Boundaries) -> None:
    """Make a causal token mixer run each document as a sequence of its own.

    Its arguments and results may be tensors, or tuples of such, of shape [rows, length, ...].
    """
    own = module.__dict__.get("forward") or MethodType(type(module).forward, module)

    def apart(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if boundaries.groups is None or boundaries.inverse is None:
            return own(*args, **kwargs)
        first = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim >= 3)
        rows, length = first.shape[:2]
        results = []
        for index in boundaries.groups:
            take = _taker(index, rows, length)
            results.append(own(*_map(args, take), **{k: _map(v, take) for k, v in kwargs.items()}))
        return _join(results, boundaries.inverse, rows, length)

    module.forward = MethodType(apart, module)


def prove_isolation(model: nn.Module, boundaries: Boundaries, forward: Callable[[Tensor, Tensor], Any]) -> list[str]:
    """Probe the model, isolate every class of module that leaks, and probe again until nothing does.

    Two rows hold the same second document after different first ones: whatever differs in the second document leaked.

    Args:
        model: as it will be trained.
        boundaries: of this model.
        forward: runs the model on ids and positions, both int64 [1, length]; its result is not used.

    Returns:
        Names of the classes that were isolated.

    Raises:
        Refused: ``packing-leaks`` where something else than a module of the blocks leaks.
    """
    device = next(p.device for p in model.parameters())
    training = model.training
    model.eval()  # dropout would differ between the two passes
    try:
        return _prove(model, boundaries, forward, device)
    finally:
        model.train(training)


def _prove(
    model: nn.Module, boundaries: Boundaries, forward: Callable[[Tensor, Tensor], Any], device: torch.device
) -> list[str]:
    isolated: list[str] = []
    while True:
        boundaries.set([list(PROBE)], device)
        culprit = _leaking_class(model, forward, device)
        boundaries.set([[1]], device)
        if culprit is None:
            return isolated
        if culprit == "" or culprit in isolated:
            advice = "set data.packing: none, so that every row holds one document"
            raise Refused("packing-leaks", "documents of one row see each other in this model", advice)
        for module in _mixers(model):
            if type(module).__name__ == culprit:
                isolate(module, boundaries)
        isolated.append(culprit)


def _leaking_class(model: nn.Module, forward: Callable[[Tensor, Tensor], Any], device: torch.device) -> str | None:
    """Class of the first mixer that mixes documents; "" where something else does, None where nothing does."""
    before, length = PROBE
    first = torch.arange(before) % 7
    second = 3 + torch.arange(length) % 5
    positions = torch.cat([torch.arange(before), torch.arange(length)])[None].to(device)
    seen: list[list[tuple[str, Tensor | None, Tensor]]] = []
    for shift in (0, 11):
        with recorded(model) as calls, torch.no_grad():
            forward(torch.cat([first + shift, second])[None].to(device), positions)
        seen.append(calls)
    leaks = False
    for (name, into, out), (_, other_into, other_out) in zip(*seen, strict=True):
        if _differ(out, other_out):
            if into is not None and other_into is not None and not _differ(into, other_into) and name:
                return str(name)
            leaks = True
    return "" if leaks else None


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[str, Tensor | None, Tensor]]]:
    """Class, input and output of every call of a part of a block, the second document's tokens only."""
    calls: list[tuple[str, Tensor | None, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        into = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim == 3), None)
        out = output[0] if isinstance(output, (tuple, list)) else output
        whole = sum(PROBE)
        if isinstance(out, Tensor) and out.ndim == 3 and out.shape[1] == whole:
            tail = into[:, PROBE[0] :].clone() if into is not None and into.shape[1] == whole else None
            calls.append((type(module).__name__, tail, out[:, PROBE[0] :].clone()))

    handles = [m.register_forward_hook(keep, with_kwargs=True) for m in _mixers(model)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _mixers(model: nn.Module) -> list[nn.Module]:
    return [child for _, block in blocks(model) for child in block.children()]


def _differ(one: Tensor, other: Tensor) -> bool:
    difference = (one - other).float().norm(dim=-1)
    scale = other.float().norm(dim=-1).clamp_min(1e-12)
    return bool((difference / scale > NOISE[one.dtype]).any())


def _taker(index: Tensor, rows: int, length: int) -> Callable[[Tensor], Tensor]:
    def take(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != length or tensor.shape[0] not in (1, rows):
            return tensor
        return tensor.expand(rows, *tensor.shape[1:]).flatten(0, 1)[index]

    return take


def _map(value: Any, take: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return take(value)
    return tuple(_map(v, take) for v in value) if isinstance(value, tuple) else value


def _join(results: list[Any], inverse: Tensor, rows: int, length: int) -> Any:
    if isinstance(results[0], tuple):
        return tuple(_join([r[i] for r in results], inverse, rows, length) for i in range(len(results[0])))
    if not isinstance(results[0], Tensor) or results[0].ndim < 3:
        return results[0]
    flat = torch.cat([r.flatten(0, 1) for r in results])
    return flat[inverse].reshape(rows, length, *flat.shape[1:])
