"""Where a model's routed experts are, and how to run them with other tensors than their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Site:
    """One layer's routed experts."""

    name: str
    """Of the experts module in the model."""
    experts: nn.Module
    block: nn.Module
    """The module that holds router, experts and, if there are, shared experts."""
    num_experts: int


def find_experts(model: nn.Module) -> list[Site]:
    """Every module that follows the experts convention of transformers: 3-D weights [E, ., .], flags, one forward.

    Call it before ``parallelize``, which gives each module the number of its own experts.
    """
    modules = dict(model.named_modules())
    sites = []
    for name, module in modules.items():
        if hasattr(module, "_is_expert_parallel") and expert_parameters(module):
            parent = modules[name.rpartition(".")[0]]
            count: Any = module.num_experts
            sites.append(Site(name=name, experts=module, block=parent, num_experts=int(count)))
    return sites


def expert_parameters(experts: nn.Module) -> list[str]:
    """Names of the parameters whose first dimension counts experts."""
    count: Any = getattr(experts, "num_experts", 0)
    return [n for n, p in experts.named_parameters() if p.ndim >= 2 and p.shape[0] == count]


def with_tensors(module: nn.Module, tensors: dict[str, Tensor], prefix: str = "") -> Any:
    """A shell of ``module`` with ``tensors``, by name, in place of its parameters; everything else is shared.

    Call ``forward`` of its class, never the shell itself: hooks are not meant to run.
    """
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    own: dict[str, Tensor | None] = {n: None for n, p in module._parameters.items() if p is None}
    own |= {n.removeprefix(prefix): t for n, t in tensors.items() if n.rpartition(".")[0] == prefix[:-1]}
    shell.__dict__["_parameters"] = {}
    shell.__dict__.update(own)
    shell.__dict__["_modules"] = {
        name: child
        if child is None or next(child.parameters(), None) is None
        else with_tensors(child, tensors, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return shell
