"""The routing hook: a router's linear layer as it is, its choice of experts by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 6


def install(hooks: Any, module: nn.Module, swap: Any) -> Callable[[], None]:
    """Let ``module`` choose by ``swap``'s kernel; returns the undo function."""
    count = _own(module, _probe(module, swap.attributes), swap.attributes)["index"].shape[-1]

    def forward(self: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            (hidden,) = hooks._only(args, kwargs, 1)
            logits = logits_of(self, hidden, swap.spec, swap.attributes)
            hooks._covered(logits)
            tensors = {"bias": getattr(self, swap.attributes["bias"]).float()} if swap.spec["bias"] else {}
            slots = torch.empty(count, dtype=torch.int32, device=logits.device)
            scores, index = swap.call(logits=logits, slots=slots, **tensors)
        except hooks.Uncovered as reason:
            swap.applied.fallbacks[swap.name] = str(reason)
            return original(*args, **kwargs)
        found = {"logits": logits, "scores": scores, "index": index}
        return tuple(found[name] for name in swap.attributes["returns"].split())

    undo: Callable[[], None] = hooks._replace_forward(module, forward)
    return undo


def logits_of(module: nn.Module, hidden: Tensor, spec: dict[str, Any], names: dict[str, str]) -> Tensor:
    """The router's linear layer on hidden states [..., D]: [N, E], in fp32 where the spec says so."""
    weight: Tensor = getattr(module, names["weight"])
    bias: Tensor | None = getattr(module, names["linear_bias"]) if "linear_bias" in names else None
    x = hidden.reshape(-1, weight.shape[-1])
    if spec["dtype"] == "float32":
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.linear(x, weight, bias)


def _probe(module: nn.Module, names: dict[str, str]) -> Tensor:
    weight: Tensor = getattr(module, names["weight"])
    steps = torch.arange(ROWS * weight.shape[-1], device=weight.device, dtype=torch.float32)
    return (steps * 0.7).sin().reshape(ROWS, -1).to(weight.dtype)


def _own(module: Any, hidden: Tensor, names: dict[str, str]) -> dict[str, Tensor]:
    with torch.no_grad():
        results = type(module).forward(module, hidden)
    return dict(zip(names["returns"].split(), results, strict=True))


def mismatch(spec: dict[str, Any], module: nn.Module, names: dict[str, str]) -> str | None:
    """Why the kernel is not this router's choice, or None: a few rows are routed both ways."""
    needed = [n for key, n in names.items() if key != "returns"]
    if not all(isinstance(getattr(module, n, None), Tensor) for n in needed) or "returns" not in names:
        return "tensors by other names"
    hidden = _probe(module, names)
    try:
        own = _own(module, hidden, names)
    except Exception as error:
        return f"its forward: {type(error).__name__}"
    experts, count = getattr(module, names["weight"]).shape[0], own["index"].shape[-1]
    size, best = experts // spec["groups"], 2 if spec["groups"] > 1 and spec["group_score"] == "top2" else 1
    if experts % spec["groups"] or size < best or count > spec["top_groups"] * size:
        return f"{count} of {experts} experts in {spec['groups']} groups"
    with torch.no_grad():
        scores, index = chosen(logits_of(module, hidden, spec, names).float(), module, spec, names, count)
    mine, theirs = index.sort(-1), own["index"].sort(-1)
    weights = own["scores"].float().gather(-1, theirs.indices)
    tolerance = 1e-4 if own["scores"].dtype == torch.float32 else 2e-2
    if not torch.equal(mine.values, theirs.values):
        return "it chooses other experts"
    same = torch.allclose(scores.gather(-1, mine.indices), weights, rtol=tolerance, atol=1e-6)
    return None if same else "its weights are others"


def chosen(
    logits: Tensor, module: nn.Module, spec: dict[str, Any], names: dict[str, str], count: int
) -> tuple[Tensor, Tensor]:
    """What the spec says: weights and index [N, K]."""
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda z: z.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda z: F.softplus(z).sqrt(),
    }
    scores = activations[spec["activation"]](logits)
    keys = scores + getattr(module, names["bias"]).float() if spec["bias"] else scores
    if spec["groups"] > 1:
        parts = keys.reshape(keys.shape[0], spec["groups"], -1)
        best = parts.topk(2 if spec["group_score"] == "top2" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(spec["top_groups"], dim=-1).indices, True)
        keys = parts.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    index = keys.topk(count, dim=-1).indices
    weights = scores.gather(-1, index)
    if spec["renormalise"]:
        weights = weights / (weights.sum(-1, keepdim=True) + spec["sum_eps"])
    return weights * spec["scale"], index
