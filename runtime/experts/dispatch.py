"""Permute, all-to-all, local experts, all-to-all, unpermute: one autograd function.

Backward sends the gradient of each token the way its input went, differentiates the local experts and collects the
gradients the way the results came back. The local experts' graph is kept inside the function; under activation
checkpointing the first pass keeps none, and the recomputation hands its graph to the first pass's backward
(``replay``). Chunks of tokens overlap: while one is computed, the next is on its way and the last returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from runtime.experts import replay
from runtime.experts.compute import run_experts
from runtime.experts.transport import Route, Transport


@dataclass
class _Graph:
    """The local experts' graph of one chunk."""

    x: Tensor
    weights: Tensor
    y: Tensor


@dataclass
class Call:
    """One pass through one layer's experts."""

    routes: list[Route] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    """[R, K] of the received rows, by chunk."""
    graphs: list[_Graph] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


def dispatch(
    transport: Transport,
    experts: nn.Module,
    parameters: dict[str, Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    chunks: int,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Run every token's experts wherever they are.

    Args:
        transport: to the other expert ranks.
        experts: the module whose forward is stood in for.
        parameters: its local tensors by name.
        x: [T, D]; T may be zero and may differ between ranks.
        index: int64 [T, K], global expert; -1 for none.
        weights: [T, K].
        chunks: the same on every rank.
        meanwhile: other work of this rank, done while the first tokens are on their way.

    Returns:
        [T, D].
    """
    replay.refuse_other_checkpoints()
    names = list(parameters)
    graded = torch.is_grad_enabled()
    result: Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        transport, experts, names, chunks, meanwhile, graded, x, index, weights, *parameters.values()
    )
    return result


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        experts: nn.Module,
        names: list[str],
        chunks: int,
        meanwhile: Callable[[], None] | None,
        graded: bool,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        phase, tape = replay.phase(), replay.current()
        call = tape.read() if tape is not None and phase == "replay" else Call()
        if tape is not None and phase == "record":
            tape.record(call)
        build = phase != "record" and any(ctx.needs_input_grad)
        bounds = [x.shape[0] * i // chunks for i in range(chunks + 1)]
        spans = [slice(a, b) for a, b in pairwise(bounds)]
        if not call.routes:
            for span in spans:
                route, received = transport.route(index[span], weights[span])
                call.routes.append(route)
                call.weights.append(received)
        leaves = [p.detach().requires_grad_(build and p.requires_grad) for p in parameters]
        tensors = dict(zip(names, leaves, strict=True))
        call.parameters = leaves if build else []
        call.graphs = []
        arriving = transport.spread(x[spans[0]], call.routes[0])
        if meanwhile is not None:
            with torch.set_grad_enabled(graded):
                meanwhile()
        returning = []
        for number, route in enumerate(call.routes):
            rows = arriving()
            if number + 1 < chunks:
                arriving = transport.spread(x[spans[number + 1]], call.routes[number + 1])
            rows = rows.detach().requires_grad_(build)
            received = call.weights[number].detach().requires_grad_(build)
            with torch.set_grad_enabled(build), _unpacked(phase):
                y = run_experts(experts, tensors, rows, route.index, received, route.counts, len(route.counts))
            if build:
                call.graphs.append(_Graph(rows, received, y))
            returning.append(transport.collect(y.detach(), route))
        parts = [pending() for pending in returning]
        ctx.transport, ctx.call, ctx.spans = transport, call, spans
        # saved last, so that a recomputation that stops at its last saved tensor has run every collective
        ctx.save_for_backward(index, weights)
        return parts[0] if chunks == 1 else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, weights = ctx.saved_tensors  # under checkpointing this runs the recomputation
        del index
        call, transport, spans = ctx.call, ctx.transport, ctx.spans
        if not call.graphs:
            raise RuntimeError("the experts' graph is gone: backward ran twice, or was recomputed without its tape")
        gradient = grads[0].contiguous()
        sums: list[Tensor | None] = [None] * len(call.parameters)
        arriving = transport.spread(gradient[spans[0]], call.routes[0])
        returning = []
        for number, (route, graph) in enumerate(zip(call.routes, call.graphs, strict=True)):
            dy = arriving()
            if number + 1 < len(spans):
                arriving = transport.spread(gradient[spans[number + 1]], call.routes[number + 1])
            dx, dweights, *dparameters = _differentiate(graph, call.parameters, dy)
            returning.append((transport.collect(dx, route), transport.collect(dweights, route)))
            sums = [
                new if old is None else old if new is None else old + new
                for old, new in zip(sums, dparameters, strict=True)
            ]
        dx = torch.cat([rows() for rows, _ in returning])
        dweights = torch.cat([rows() for _, rows in returning]).to(weights.dtype)
        # an expert that nobody chose has a gradient of zero, not none: every rank joins every reduction
        finished = [
            torch.zeros_like(p) if total is None and p.requires_grad else total
            for total, p in zip(sums, call.parameters, strict=True)
        ]
        call.graphs, call.parameters = [], []
        return (None, None, None, None, None, None, dx, None, dweights, *finished)


def _differentiate(graph: _Graph, parameters: list[Tensor], dy: Tensor) -> list[Any]:
    """Gradients of the received rows, of their weights and of the parameters (None where there is none)."""
    inputs = [graph.x, graph.weights, *(p for p in parameters if p.requires_grad)]
    if graph.y.requires_grad:
        found = iter(torch.autograd.grad(graph.y, inputs, dy, allow_unused=True))
    else:
        found = iter(())  # no row came here
    dx, dweights = next(found, None), next(found, None)
    return [
        torch.zeros_like(graph.x) if dx is None else dx,
        torch.zeros_like(graph.weights) if dweights is None else dweights,
        *(next(found, None) if p.requires_grad else None for p in parameters),
    ]


def _unpacked(phase: str) -> AbstractContextManager[object]:
    """In a recomputation the inner graph keeps its tensors; the checkpoint counts only those of the outer graph."""
    return saved_tensors_hooks(lambda t: t, lambda t: t) if phase == "replay" else nullcontext()
