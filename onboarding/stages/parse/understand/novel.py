"""What matches nothing known: the module's own subgraph becomes its definition, tried on fresh inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onboarding.architecture import Component, NovelReference
from onboarding.stages.parse.build import quiet
from onboarding.stages.parse.understand.compare import CLOSE, parameters_as
from onboarding.stages.parse.understand.ledger import Ledger
from onboarding.stages.parse.understand.observe import Call
from onboarding.stages.parse.uses.proof import relative_error

LONGEST = 60_000
"""Characters of a subgraph that is kept; a longer one is a loop that no one would read."""


def keep_subgraph(call: Call, part: Component, ledger: Ledger) -> None:
    """Trace a module's forward as a graph over its parameters and inputs, try it on others, and keep it.

    The claim ``X: novel`` is proven when the graph gives the module's outputs and gradients on inputs that it was not
    traced with.
    """
    module: Any = call.function
    name = type(module).__name__
    inputs = [t for t in dict.fromkeys(call.tensors()) if t.is_floating_point()]
    parameters = {n: p for n, p in module.named_parameters() if p.is_floating_point()}

    def run(values: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        with parameters_as(module, dict(zip(parameters, values, strict=True))):
            output = call.again({id(t): g for t, g in zip(inputs, given, strict=True)}, module)
        leaves = torch.utils._pytree.tree_leaves(output)
        return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]

    check = "the module's own subgraph on fresh inputs: outputs and gradients"
    try:
        with quiet():
            graph = make_fx(run)([p.detach() for p in parameters.values()], [t.detach() for t in inputs])
            error = _difference(run, graph, list(parameters.values()), inputs)
    except Exception as failure:
        ledger.unproven(part, f"{name}: novel", f"its subgraph depends on data: {type(failure).__name__}")
        return
    if ledger.claim(part, f"{name}: novel, defined by its own subgraph", check, error, CLOSE):
        ledger.novel.append(
            NovelReference(
                module=name,
                path=call.path,
                code=graph.code[:LONGEST],
                inputs=[f"{n} {list(p.shape)}" for n, p in parameters.items()]
                + [f"input {i} {list(t.shape)}" for i, t in enumerate(inputs)],
                error=error,
            )
        )


def _difference(run: Any, graph: Any, parameters: list[Tensor], inputs: list[Tensor]) -> float:
    generator = torch.Generator().manual_seed(71)
    fresh = [
        t.detach() + 0.3 * t.detach().std().nan_to_num(1.0) * torch.randn(t.shape, generator=generator) for t in inputs
    ]

    def both(function: Any) -> list[Tensor]:
        values = [p.detach().clone().requires_grad_(True) for p in parameters]
        given = [t.clone().requires_grad_(True) for t in fresh]
        with torch.enable_grad():
            outputs = function(values, given)
            noise = torch.Generator().manual_seed(72)
            total = sum((o * torch.randn(o.shape, generator=noise)).sum() for o in outputs if o.requires_grad)
            if not isinstance(total, Tensor):
                return [o.detach() for o in outputs]
            found = torch.autograd.grad(total, [*values, *given], allow_unused=True)
        return [*(o.detach() for o in outputs), *(g for g in found if g is not None)]

    mine, theirs = both(graph), both(run)
    if len(mine) != len(theirs):
        return float("inf")
    return max(
        (relative_error(a, b) for a, b in zip(mine, theirs, strict=True) if float(b.abs().max()) > 0), default=0.0
    )
