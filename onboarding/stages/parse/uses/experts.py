"""Routed experts behind transformers' experts interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernel_templates.moe.spec import Spec
from onboarding.stages.parse.leaves import LeafCall
from onboarding.stages.parse.uses.gates import joined, probe_gate, small_sizes
from onboarding.stages.parse.uses.instance import small_instance, with_eager_experts
from onboarding.stages.parse.uses.proof import same_function

ATTRIBUTES = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
SMALL_EXPERTS = 5


def prove_experts(module: nn.Module, call: LeafCall, dtype: str) -> Spec | None:
    """The experts spec that a module computes, or None.

    The interface's own flags say how the weights lie; the gate is probed; then a small instance of the class runs its
    eager loop against the family's reference.
    """
    owner: Any = module
    if not getattr(owner, "has_gate", False) or getattr(owner, "has_post_expert_norm", False):
        return None
    parameters = dict(module.named_parameters(recurse=False))
    has_bias = bool(getattr(owner, "has_bias", False))
    wanted = {*ATTRIBUTES.values(), *(BIASES.values() if has_bias else ())}
    if set(parameters) != wanted:
        return None
    layout = "concatenated" if owner.is_concatenated else "interleaved"
    transposed = bool(owner.is_transposed)
    count, first, second = parameters["down_proj"].shape
    inner, hidden = (first, second) if transposed else (second, first)
    # only the gate is probed here: sizes do not matter to it
    probe = small_instance(module, {size: 2 for p in parameters.values() for size in p.shape}, torch.Generator())
    flags = probe_gate(lambda gate, up: probe._apply_gate(joined(gate, up, layout)))
    if flags is None:
        return None
    spec = Spec(
        experts=count,
        top_k=call.facts["top_k"],
        hidden=hidden,
        intermediate=inner,
        activation=flags.activation,
        limit=flags.limit,
        alpha=flags.alpha,
        up_offset=flags.up_offset,
        gate_up_layout=layout,
        transposed=transposed,
        bias=has_bias,
        dtype=dtype,
    )
    return spec if _proven(module, spec) else None


def _proven(module: nn.Module, spec: Spec) -> bool:
    generator = torch.Generator().manual_seed(13)
    sizes = small_sizes(spec.hidden, spec.intermediate)
    # where there are as many experts as channels, the small instance keeps that
    count = sizes.setdefault(spec.experts, SMALL_EXPERTS)
    clone = small_instance(module, sizes, generator)
    with_eager_experts(clone)
    k, d = min(2, spec.top_k), sizes[spec.hidden]
    small = spec.resized(experts=count, top_k=k, hidden=d, intermediate=sizes[spec.intermediate])
    tokens = 9
    attributes = {**ATTRIBUTES, **(BIASES if spec.bias else {})}
    tensors: dict[str, torch.Tensor | None] = {
        "x": torch.randn(tokens, d, generator=generator) * (spec.limit or 1.0),
        "index": torch.stack([torch.randperm(count, generator=generator)[:k] for _ in range(tokens)]),
        "scores": torch.rand(tokens, k, generator=generator),
        **{name: clone.get_parameter(attribute).detach() for name, attribute in attributes.items()},
    }

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        values = {attribute: given[name] for name, attribute in attributes.items()}
        arguments = (given["x"], given["index"], given["scores"])
        return {"y": torch.func.functional_call(clone, values, arguments)}  # type: ignore[arg-type]

    return same_function(run, small, tensors)
