"""The operator graph, forward and backward, at full size: one layer of each kind runs, the others pass through."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from onboarding.problem import Problem
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.cost import is_free, is_matmul, operator_cost, tensors_of
from onboarding.stages.parse.leaves import (
    LeafCall,
    MarkedFunction,
    Replace,
    is_linear_attention,
    leaves_in_place,
    marked_functions,
    modeling_modules,
)
from onboarding.stages.parse.scans import PROBE_LENGTHS, Growth, ScanLeaves, ScanProbe, loops
from onboarding.stages.parse.structure import Structure

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
    notes: list[str] = field(default_factory=list)
    backward: bool = False


class Tracer(TorchDispatchMode):
    """Records every operator with the module that it belongs to.

    Backward operators find their module by the autograd sequence number: nodes made while a module ran carry the
    numbers of that interval.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.trace = Trace()
        self.phase: Phase = "forward"
        self._names = names
        self._stack: list[str] = [""]
        self._mute = 0
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
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        number = node._sequence_nr() if node is not None else -1
        if not 0 <= number <= self._marks[-1][0]:
            return self._last_backward  # gradient accumulation carries no number: it follows its operator
        index = bisect.bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1
        self._last_backward = self._marks[max(index, 0)][1]
        return self._last_backward

    _last_backward = ""

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
            args = (args[0], [_all_kept(i) for i in args[1]], *args[2:])
        elif func is aten.nonzero.default:
            source = args[0]
            return source.new_zeros((source.numel(), source.dim()), dtype=torch.int64)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not aten._local_scalar_dense.default:
                raise
            self.note("a branch depends on values of the data; the traced path takes them as true or one")
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1

    def restart(self) -> None:
        """Forget what a failed attempt recorded."""
        self.trace.operations.clear()
        self.trace.calls.clear()
        self.trace.marked.clear()
        del self._stack[1:]
        self._mark()

    def note(self, text: str) -> None:
        """Keep a remark once."""
        if text not in self.trace.notes:
            self.trace.notes.append(text)


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _all_kept(index: torch.Tensor | None) -> torch.Tensor | None:
    """A mask that keeps everything, as positions."""
    if index is None or not _is_mask(index):
        return index
    return index.new_zeros((index.numel(),), dtype=torch.int64)


def _swap(output: Any, hidden: torch.Tensor) -> Any:
    """A layer's output with its hidden states replaced."""
    if isinstance(output, torch.Tensor):
        return hidden
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    if isinstance(output, list):
        return [hidden, *output[1:]]
    raise Problem(
        "layer-output-unknown", f"a decoder layer returns {type(output).__name__}", "a tensor or a tuple is expected"
    )


@contextmanager
def one_layer_per_kind(structure: Structure) -> Iterator[None]:
    """Let only the first layer of each kind run; a layer of a known kind hands its input on.

    Layers keep their place, so that schedules by position (masks, caches, rotary tables) stay right.
    """
    outputs: dict[int, Any] = {}
    handles = []
    patched: list[nn.Module] = []

    def keep(first: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[first] = output

        return hook

    def pass_through(first: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return _swap(outputs[first], hidden)

        return forward

    seen: set[int] = set()
    for kind in structure.kinds:
        for index in kind.layers:
            layer = structure.layers[index]
            if id(layer) in seen:
                continue  # one module at several positions (shared blocks) runs at each
            seen.add(id(layer))
            if index == kind.first:
                handles.append(layer.register_forward_hook(keep(kind.first)))
            else:
                layer.forward = pass_through(kind.first)
                patched.append(layer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in patched:
            del layer.forward


@contextmanager
def _module_hooks(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        tracer.enter(module, args, kwargs)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        tracer.leave()

    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _loss(model: Any, structure: Structure, ids: torch.Tensor, tracer: Tracer) -> torch.Tensor:
    """The training loss: of the whole class, or of its text decoder and head where the class wants images."""
    try:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
    except Exception as error:
        if structure.text_config is model.config:
            raise
        tracer.restart()
        tracer.note(
            f"the class does not run on text alone ({type(error).__name__}): its text decoder and head were traced"
        )
    hidden = model.get_submodule(structure.decoder_prefix)(input_ids=ids, use_cache=False)[0]
    logits = model.get_output_embeddings()(hidden)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def _step(
    model: nn.Module, mode: FakeTensorMode, structure: Structure, tokens: int, tracer: Tracer, replace: Replace
) -> None:
    """One training step of one sequence under a tracer."""
    with quiet(), mode:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with (
            leaves_in_place(model, tracer, replace),
            one_layer_per_kind(structure),
            _module_hooks(model, tracer),
            tracer,
        ):
            try:
                loss = _loss(model, structure, ids, tracer)
            except Problem:
                raise
            except Exception as error:
                raise Problem(
                    "model-not-traced",
                    f"the forward of {type(model).__name__} does not run at its published size",
                    f"{type(error).__name__}: {' '.join(str(error).split())[:500]}",
                ) from error
            tracer.phase = "backward"
            try:
                loss.backward()  # type: ignore[no-untyped-call]
                tracer.trace.backward = True
            except Exception as error:
                tracer.note(f"the backward does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        for parameter in model.parameters():
            parameter.grad = None


def _observed(marked: MarkedFunction, tracer: Tracer) -> Callable[..., Any]:
    """A marked function that is cheap to trace as it is: only that it was called is noted."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        tracer.trace.marked.append((tracer.path, marked.kernel))
        return marked.function(*args, **kwargs)

    return observed


def trace_model(model: nn.Module, mode: FakeTensorMode, structure: Structure, tokens: int) -> Trace:
    """Trace one training step (forward, loss, backward) of one sequence.

    Args:
        model: built by :func:`onboarding.stages.parse.build.build_model`.
        mode: the fake mode that it was built under.
        structure: its layers and kinds.
        tokens: length of the sequence, batch 1.

    Raises:
        Problem: ``model-not-traced`` when the forward does not run; a failing backward is only a note.
    """
    model.train()
    marked = [m for module in modeling_modules(model) for m in marked_functions(module)]
    looping = {(m.module, m.attribute) for m in marked if loops(m.function) and not is_linear_attention(m.function)}
    tracer = Tracer(structure.names)
    scans: ScanLeaves | None = None
    if looping:
        probes = []
        for length in PROBE_LENGTHS:
            probe = ScanProbe(Tracer(structure.names), looping)
            _step(model, mode, structure, length, probe.tracer, probe.wrap)
            probes.append(probe.settle())
        scans = ScanLeaves(tracer, Growth(short=probes[0], long=probes[1]), tokens)

    def replace(marked: MarkedFunction) -> Callable[..., Any]:
        if scans is not None and (marked.module, marked.attribute) in looping:
            return scans.wrap(marked)
        return _observed(marked, tracer)

    _step(model, mode, structure, tokens, tracer, replace)
    return tracer.trace
