"""The dispatch mode that records every operator with the module that it belongs to."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from onboarding.stages.parse.constants import count_true, real_value
from onboarding.stages.parse.cost import is_free, is_matmul, operator_cost, tensors_of
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.rotary import RotaryCall

Phase = Literal["forward", "backward"]
aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operator that ran."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    path: str
    """Name of the innermost module."""
    phase: Phase
    flops: float
    bytes_moved: float
    matmul: bool
    leaf: LeafCall | None = None


@dataclass(frozen=True, kw_only=True)
class PlainCost:
    """What a function costs as plain torch operators, one after the other."""

    operators: int
    flops: float
    bytes_moved: float


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of a module, with the shapes of its tensor arguments."""

    path: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str


@dataclass(kw_only=True)
class Trace:
    """What one training step of the traced layers does."""

    operations: list[Operation] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    marked: list[tuple[str, str]] = field(default_factory=list)
    """(module path, library function) of marked functions that ran as they are."""
    rotary: list[RotaryCall] = field(default_factory=list)
    """Calls of functions that turn queries and keys."""
    notes: list[str] = field(default_factory=list)
    backward: bool = False
    tokens: int = 0
    """Length of the sequence that was traced."""
    shorter: Trace | None = None
    """The same at half the length, for how costs grow; None where the sequence is too short."""
    tower: bool | None = None
    """Whether the vision tower was traced, as far as it can be trained; None where there is none."""
    tower_failure: Exception | None = None
    """Why the vision tower ran on no input that was tried."""
    saved: dict[str, float] = field(default_factory=dict)
    """Module path -> bytes that its forward keeps for the backward."""
    without_gradient: list[str] = field(default_factory=list)
    """Parameters of modules that ran and that the loss does not reach."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator with the module that it belongs to.

    Backward operators find their module by the autograd sequence number: nodes made while a module ran carry the
    numbers of that interval.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.phase: Phase = "forward"
        self._names = names
        self._stack: list[str] = [""]
        self._mute = 0
        self._stored: set[int] = set()
        self._marks: list[tuple[int, str]] = [(0, "")]

    # ---- where we are ---------------------------------------------------------------------------------------

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside a leaf nothing is recorded."""
        self._mute += 1
        try:
            yield
        finally:
            self._mute -= 1

    @property
    def rotary(self) -> list[RotaryCall]:
        """Where calls of functions that turn queries and keys are noted."""
        return self.trace.rotary

    @property
    def path(self) -> str:
        """Name of the module whose forward runs."""
        return self._stack[-1]

    @contextmanager
    def under(self, path: str) -> Iterator[None]:
        """Attribute what runs inside to a path of its own."""
        self._stack.append(path)
        self._mark()
        try:
            yield
        finally:
            self.leave()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward starts."""
        path = self._names.get(id(module), self._stack[-1])
        tensors = tensors_of((args, kwargs))
        if tensors:
            shapes = tuple(tuple(t.shape) for t in tensors)
            self.trace.calls.append(ModuleCall(path=path, shapes=shapes, dtype=str(tensors[0].dtype)))
        self._stack.append(path)
        self._mark()

    def leave(self) -> None:
        """A module's forward ends."""
        if len(self._stack) > 1:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((torch.autograd._get_sequence_nr(), self._stack[-1]))  # type: ignore[attr-defined]

    def _path(self) -> str:
        if self.phase == "forward":
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else -1
        if not 0 <= number <= self._marks[-1][0]:
            return self._last_backward  # gradient accumulation carries no number: it follows its operator
        index = bisect.bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1
        self._last_backward = self._marks[max(index, 0)][1]
        return self._last_backward

    _last_backward = ""
    _guessed = False

    # ---- what is kept for the backward --------------------------------------------------------------------

    @contextmanager
    def saving(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Count the storage that autograd keeps, each once; parameters are there anyway."""
        known = {_storage(p) for p in parameters}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage(tensor)
            if key not in known and key not in self._stored:
                self._stored.add(key)
                size = float(tensor.untyped_storage().nbytes())
                self.trace.saved[self.path] = self.trace.saved.get(self.path, 0.0) + size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    # ---- what ran -------------------------------------------------------------------------------------------

    def leaf(self, call: LeafCall, phase: Phase) -> None:
        """Record a marked function's call."""
        self.trace.operations.append(
            Operation(
                name=call.name,
                shapes=call.shapes,
                path=self._path(),
                phase=phase,
                flops=call.flops if phase == "forward" else call.backward_flops,
                bytes_moved=call.bytes_moved if phase == "forward" else call.backward_bytes,
                matmul=True,
                leaf=call,
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if not self._mute and not is_free(func):
            flops, moved = operator_cost(func, args, kwargs, result)
            self.trace.operations.append(
                Operation(
                    name=func._schema.name.partition("::")[2],
                    shapes=tuple(tuple(t.shape) for t in tensors_of((args, kwargs))),
                    path=self._path(),
                    phase=self.phase,
                    flops=flops,
                    bytes_moved=moved,
                    matmul=is_matmul(func),
                )
            )
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; where its result depends on data, take the full-size case."""
        if func is aten.index.Tensor and any(_is_mask(i) for i in args[1] if i is not None):
            args = (args[0], [place for index in args[1] for place in _all_kept(index)], *args[2:])
        elif func is aten.nonzero.default and real_value(args[0]) is None:
            source = args[0]
            return source.new_zeros((source.numel(), source.dim()), dtype=torch.int64)
        elif func is aten.split_with_sizes.default and self._guessed:
            args = (args[0], _fitting(args[1], args[0].shape[kwargs.get("dim", _at(args, 2, 0))]), *args[2:])
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not aten._local_scalar_dense.default:
                raise
            self._guessed = True
            self.note("a branch depends on values of the data; the traced path takes them as true or one")
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        except DynamicOutputShapeException:
            if func is not aten.repeat_interleave.Tensor:
                raise
            self._guessed = True
            self.note("a count depends on values of the data; the traced path repeats each entry once")
            return args[0].new_zeros((args[0].numel(),), dtype=torch.int64)

    def measured(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> dict[Phase, PlainCost]:
        """What a function costs as plain torch operators, forward and backward; nothing of it is recorded here.

        What it keeps for the backward is counted where the call stands.

        Args:
            function: of the tensors; what it returns, or the first of it, is taken back.
            tensors: its inputs; each gets a gradient.
        """
        apart, kept = Tracer({}), dict[int, float]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[_storage(tensor)] = float(tensor.untyped_storage().nbytes())
            return tensor

        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        with self.silent(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), apart:
            result = function(*inputs)
            first = result if isinstance(result, torch.Tensor) else result[0]
            apart.phase = "backward"
            torch.autograd.grad(first, inputs, torch.empty_like(first))
        there = {_storage(tensor) for tensor in inputs}
        self.trace.saved[self.path] = self.trace.saved.get(self.path, 0.0) + sum(
            size for storage, size in kept.items() if storage not in there
        )
        operations: dict[Phase, list[Operation]] = {"forward": [], "backward": []}
        for operation in apart.trace.operations:
            operations[operation.phase].append(operation)
        return {
            phase: PlainCost(
                operators=len(ran), flops=sum(o.flops for o in ran), bytes_moved=sum(o.bytes_moved for o in ran)
            )
            for phase, ran in operations.items()
        }

    def restart(self) -> None:
        """Forget what a failed attempt recorded."""
        self.trace.operations.clear()
        self.trace.calls.clear()
        self.trace.marked.clear()
        self.trace.rotary.clear()
        self.trace.saved.clear()
        self._stored.clear()
        del self._stack[1:]
        self._mark()

    def note(self, text: str) -> None:
        """Keep a remark once."""
        if text not in self.trace.notes:
            self.trace.notes.append(text)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _at(values: Sequence[Any], index: int, default: Any) -> Any:
    return values[index] if len(values) > index else default


def _fitting(sizes: Sequence[int], total: int) -> list[int]:
    """Sizes of parts; where they were read from data that is not there, even parts."""
    if sum(sizes) == total or not sizes:
        return list(sizes)
    each = total // len(sizes)
    return [each + (i < total - each * len(sizes)) for i in range(len(sizes))]


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _all_kept(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """A mask as positions along each of its dims: what it keeps if that is known, else everything."""
    if index is None or not _is_mask(index):
        return [index]
    real = real_value(index)
    count = index.numel() if real is None else count_true(real)
    return [index.new_zeros((count,), dtype=torch.int64)] * index.dim()
