"""The operator graph, forward and backward, at full size: one layer of each kind runs, the others pass through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onboarding.problem import Problem
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.leaves import Replace, leaves_in_place
from onboarding.stages.parse.marked import (
    MarkedFunction,
    is_linear_attention,
    marked_functions,
    modeling_modules,
)
from onboarding.stages.parse.scans import PROBE_LENGTHS, Growth, ScanLeaves, ScanProbe, loops
from onboarding.stages.parse.structure import Structure
from onboarding.stages.parse.tracer import Trace, Tracer


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
