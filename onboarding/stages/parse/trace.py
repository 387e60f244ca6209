"""The operator graph, forward and backward, at full size: one layer of each kind runs, the others pass through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onboarding.problem import Problem
from onboarding.stages.parse.backbones import missing_in
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.constants import small_constants
from onboarding.stages.parse.growth import SHORTEST
from onboarding.stages.parse.inputs import (
    loss_of,
    sequence_limit,
    stated_limit,
    with_image,
)
from onboarding.stages.parse.leaves import Replace, leaves_in_place
from onboarding.stages.parse.marked import (
    MarkedFunction,
    is_linear_attention,
    marked_functions,
    modeling_modules,
    own_loops,
)
from onboarding.stages.parse.scans import PROBE_LENGTHS, Growth, ScanLeaves, ScanProbe, loops
from onboarding.stages.parse.structure import Structure
from onboarding.stages.parse.towers import find_tower_call, tower_modules
from onboarding.stages.parse.tracer import Trace, Tracer


def _swap(output: Any, hidden: torch.Tensor) -> Any:
    """A layer's output with its hidden states replaced."""
    if isinstance(output, torch.Tensor):
        return hidden
    if hasattr(output, "_fields") or hasattr(output, "keys"):
        return output  # named outputs of two streams and the like: those of the layer that ran
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
    """The training loss: of the class on text, else on text and an image, else of its text decoder and head."""
    arguments = [{"input_ids": ids, "labels": ids, "use_cache": False}, *with_image(model, ids)]
    failure: Exception | None = None
    tried: list[str] = []
    for given in arguments:
        try:
            output = model(**given)
        except Exception as error:
            failure = failure or error
            tried.append(f"{', '.join(given)}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            tracer.restart()
            continue
        if failure is not None:
            tracer.note(f"the class does not run on text alone: it was given {', '.join(sorted(given))}")
            if any("pixel" in name or "patches" in name for name in given):
                tracer.trace.tower = True  # the image goes through it in this very step
        return loss_of(output, ids)
    assert failure is not None
    if len(tried) > 1:
        tracer.note(f"other inputs that the class refused: {'; '.join(tried[1:4])}")
    if structure.text_config is model.config:
        raise failure
    tracer.note(
        f"the class does not run on text alone ({type(failure).__name__}): its text decoder and head were traced"
    )
    try:
        hidden = model.get_submodule(structure.decoder_prefix)(input_ids=ids, use_cache=False)[0]
        logits = model.get_output_embeddings()(hidden)
    except Exception:
        raise failure from None
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def _step(
    model: nn.Module, mode: FakeTensorMode, structure: Structure, tokens: int, tracer: Tracer, replace: Replace
) -> None:
    """One training step of one sequence under a tracer, and one of the vision tower where the class has one."""
    with quiet(), mode, small_constants(mode):
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with (
            leaves_in_place(model, tracer, replace),
            one_layer_per_kind(structure),
            _module_hooks(model, tracer),
            tracer.saving(model.parameters()),
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
                    "; ".join([f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", *tracer.trace.notes]),
                ) from error
            tracer.trace.backward = _backward(loss, tracer, "the backward")
        tracer.trace.without_gradient = _without_gradient(model, tracer.trace)
        for parameter in model.parameters():
            parameter.grad = None


def _tower_step(model: nn.Module, mode: FakeTensorMode, structure: Structure, tracer: Tracer) -> None:
    """One image through the vision tower, forward and backward."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if (missing := missing_in(model)) is not None:
        tracer.trace.tower = False
        tracer.note(f"the vision tower is timm's {missing}: not counted and not traced, since timm is not installed")
        return
    if tracer.trace.tower or not tower_modules(model, structure.prefix):
        return
    with quiet(), mode, small_constants(mode), leaves_in_place(model, tracer, lambda _: None):
        call, tried, failure = find_tower_call(model, structure.prefix, dtype, tracer)
        if call is None:
            tracer.trace.tower, tracer.trace.tower_failure = False, failure
            tracer.note(f"the vision tower was not traced: {tried[0] if tried else 'nothing takes an image'}")
            return
        tracer.phase = "forward"
        tracer.note(f"vision tower: {call.words}")
        with _module_hooks(model, tracer), tracer.saving(model.parameters()), tracer:
            features = call.run()
            tracer.trace.tower = True
            if features:
                total = sum((f.float().sum() for f in features[1:]), features[0].float().sum())
                tracer.trace.tower = _backward(total, tracer, "the backward of the vision tower")
            else:
                tracer.note("no gradient comes back from the vision tower: its code runs it without")
        for parameter in model.parameters():
            parameter.grad = None


def _backward(loss: torch.Tensor, tracer: Tracer, what: str) -> bool:
    tracer.phase = "backward"
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        tracer.note(f"{what} does not run: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return False
    return True


def _without_gradient(model: nn.Module, trace: Trace) -> list[str]:
    """Trainable parameters of modules that ran and whose gradient is still None."""
    ran = {call.path for call in trace.calls}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and name.rpartition(".")[0] in ran
    ]


def _observed(marked: MarkedFunction, tracer: Tracer) -> Callable[..., Any]:
    """A marked function that is cheap to trace as it is: only that it was called is noted."""

    def observed(*args: Any, **kwargs: Any) -> Any:
        tracer.trace.marked.append((tracer.path, marked.kernel))
        return marked.function(*args, **kwargs)

    return observed


def _looping_forwards(
    model: nn.Module, mode: FakeTensorMode, structure: Structure
) -> set[tuple[ModuleType | type, str]]:
    """Classes whose forward was seen to run more operators the longer the sequence: a Python loop over tokens."""
    held = [m for module in modeling_modules(model) for m in own_loops(module, forwards=True)]
    used = {type(module) for module in model.modules()}
    held = [marked for marked in held if marked.module in used]
    if not held:
        return set()
    counts = []
    for length in PROBE_LENGTHS:
        probe = Tracer(structure.names)
        _step(model, mode, structure, length, probe, lambda _: None)
        counts.append(Counter(operation.path for operation in probe.trace.operations))
    more = PROBE_LENGTHS[1] - PROBE_LENGTHS[0]
    classes = {type(m) for name, m in model.named_modules() if counts[1][name] - counts[0][name] >= more}
    return {(marked.module, marked.attribute) for marked in held if marked.module in classes}


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
    limit, notes = sequence_limit(model, tokens)
    try:
        trace = _trace(model, mode, structure, limit - limit % 2 if limit > 1 else limit)
    except Problem:
        stated = stated_limit(model)
        if stated is None or stated >= limit:
            raise
        notes = [f"traced at {stated} tokens: the class does not run beyond"]
        trace = _trace(model, mode, structure, stated)
    trace.notes[:0] = notes
    return trace


def _trace(model: nn.Module, mode: FakeTensorMode, structure: Structure, tokens: int) -> Trace:
    marked = [m for module in modeling_modules(model) for m in (*marked_functions(module), *own_loops(module))]
    looping = {(m.module, m.attribute) for m in marked if loops(m.function) and not is_linear_attention(m.function)}
    looping |= _looping_forwards(model, mode, structure)
    tracer = Tracer(structure.names)
    growth: Growth | None = None
    if looping:
        probes = []
        for length in PROBE_LENGTHS:
            probe = ScanProbe(Tracer(structure.names), looping)
            _step(model, mode, structure, length, probe.tracer, probe.wrap)
            probes.append(probe.settle())
        growth = Growth(short=probes[0], long=probes[1])

    def replacing(tracer: Tracer, length: int) -> Replace:
        scans = ScanLeaves(tracer, growth, length) if growth is not None else None

        def replace(marked: MarkedFunction) -> Callable[..., Any] | None:
            if scans is not None and (marked.module, marked.attribute) in looping:
                return scans.wrap(marked)
            return _observed(marked, tracer) if marked.package else None

        return replace

    _step(model, mode, structure, tokens, tracer, replacing(tracer, tokens))
    if tokens >= 2 * SHORTEST and tracer.trace.backward:
        half = Tracer(structure.names)
        try:
            _step(model, mode, structure, tokens // 2, half, replacing(half, tokens // 2))
            tracer.trace.shorter = half.trace
        except Problem:
            tracer.note("the class runs at one length only: how costs grow is not known")
    _tower_step(model, mode, structure, tracer)
    tracer.trace.tokens = tokens
    return tracer.trace
