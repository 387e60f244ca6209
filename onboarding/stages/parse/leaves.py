"""Functions that transformers marks as replaceable run as single nodes, with costs from their definition.

Attention and experts go through interfaces, linear attention through functions decorated with
``use_kernel_func_from_hub_with_fallback``. Their plain torch versions are loops over chunks or experts: hundreds of
thousands of operators that no one would run. Each is one node forward and one backward here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from transformers import masking_utils
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_utils import AttentionInterface

from onboarding.stages.parse.cost import tensor_bytes
from onboarding.stages.parse.marked import (
    MarkedFunction,
    is_linear_attention,
    is_short_convolution,
    is_state_space,
    linear_attention_arguments,
    marked_functions,
    modeling_modules,
    own_loops,
    short_convolution_arguments,
)
from onboarding.stages.parse.rotary import observed, rotary_functions
from onboarding.stages.parse.sdpa import names_of_torch_attention, torch_attention_leaf

ATTENTION_BACKWARD = 2.5
"""Backward over forward matrix products: five against two, because the scores are computed again (FlashAttention)."""


@dataclass(frozen=True, kw_only=True)
class LeafCall:
    """One call of a marked function."""

    kind: str
    """``attention``, ``experts``, ``linear_attention``, ``state_space``, ``short_convolution`` or ``scan``."""
    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    backward_flops: float
    bytes_moved: float
    backward_bytes: float
    facts: dict[str, Any] = field(default_factory=dict)


class Leaf(torch.autograd.Function):
    """A node that allocates its outputs and, backward, the gradients of its inputs; it computes nothing."""

    @staticmethod
    def forward(ctx: Any, sink: Any, call: LeafCall, make: Callable[[], Any], *tensors: torch.Tensor) -> Any:
        ctx.sink, ctx.call = sink, call
        ctx.save_for_backward(*tensors)
        with sink.silent():
            outputs = make()
        sink.leaf(call, "forward")
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with ctx.sink.silent():
            found = [torch.empty_like(t) if t.is_floating_point() else None for t in ctx.saved_tensors]
        ctx.sink.leaf(ctx.call, "backward")
        needs = ctx.needs_input_grad[3:]
        return (None, None, None, *(g if need else None for g, need in zip(found, needs, strict=True)))


def run_leaf(sink: Any, call: LeafCall, make: Callable[[], Any], *tensors: torch.Tensor) -> Any:
    """Run a leaf in the autograd graph of its inputs."""
    return Leaf.apply(sink, call, make, *tensors)  # type: ignore[no-untyped-call]


def visible_pairs(queries: int, keys: int, *, causal: bool, window: int | None) -> float:
    """Query-key pairs that attention must look at: all, the causal half, or a causal window (also a top-k)."""
    if not causal:
        return float(queries * keys)
    width = min(window or keys, keys)
    # the first ``width`` queries of a full-length causal mask see 1, 2, ... keys
    ramp = min(width, queries)
    if queries != keys:
        return float(queries * width)
    return ramp * (ramp + 1) / 2 + float(queries - ramp) * width


def _top_k_of(module: nn.Module) -> int | None:
    """How many keys a sparse indexer inside the attention keeps for each query."""
    for child in module.modules():
        value = getattr(child, "index_topk", None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def attention_leaf(sink: Any, implementation: str, plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A replacement for every attention function: q [B, H, T, D], k, v [B, HK, S, D] -> [B, T, H, DV].

    Args:
        sink: the tracer.
        implementation: what transformers would run: ``sdpa``, ``eager`` ...
        plain: the class's own torch code, where that is what would run: it is measured.
    """

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        b, h, t, d = query.shape
        s, dv = key.shape[-2], value.shape[-1]
        causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
        window, top_k = kwargs.get("sliding_window"), _top_k_of(module)
        pairs = visible_pairs(t, s, causal=causal, window=min(filter(None, (window, top_k)), default=None))
        flops = 2.0 * b * h * pairs * (d + dv)
        tensors = (query, key, value)
        moved = tensor_bytes(tensors) + b * t * h * dv * value.element_size()
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux") is not None
        facts = {
            "query_heads": h,
            "key_heads": key.shape[1],
            "window": window,
            "top_k": top_k,
            "causal": causal,
            "sinks": sinks,
            "softcap": softcap,
            "mask": attention_mask is not None,
            "implementation": implementation,
        }
        if plain is not None:
            facts["plain"] = sink.measured(
                lambda q, k, v: plain(module, q, k, v, attention_mask, *args, **kwargs), tensors
            )
        call = LeafCall(
            kind="attention",
            name=f"attention top {top_k}" if top_k else "attention",
            shapes=tuple(tuple(x.shape) for x in tensors),
            flops=flops,
            backward_flops=ATTENTION_BACKWARD * flops,
            bytes_moved=moved,
            backward_bytes=2 * moved,
            facts=facts,
        )
        out = run_leaf(sink, call, lambda: value.new_empty(b, t, h, dv), *tensors)
        return out, None

    return attention


def experts_leaf(sink: Any) -> Callable[..., Any]:
    """A replacement for every experts function: x [T, D], index [T, K], weights [T, K] -> [T, D]."""

    def experts(
        module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        tokens, k = top_k_index.shape[0], top_k_index.shape[-1]
        parameters = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        matrices = [p for p in parameters if p.dim() == 3]
        count = min(p.shape[0] for p in matrices)
        per_expert = sum(p.numel() // p.shape[0] for p in matrices)
        flops = 2.0 * tokens * k * per_expert
        hit = min(count, tokens * k)
        weights = hit * per_expert * matrices[0].element_size()
        activations = 2 * tensor_bytes([hidden_states])
        call = LeafCall(
            kind="experts",
            name="experts",
            shapes=(tuple(hidden_states.shape), tuple(top_k_index.shape), *(tuple(p.shape) for p in matrices)),
            flops=flops,
            backward_flops=2 * flops,
            bytes_moved=weights + activations,
            backward_bytes=2 * (weights + activations),
            facts={"experts": count, "top_k": k, "tokens": tokens},
        )
        tensors = (hidden_states, top_k_weights, *parameters)
        out: torch.Tensor = run_leaf(sink, call, lambda: torch.empty_like(hidden_states), *tensors)
        return out

    return experts


def linear_attention_leaf(sink: Any, marked: MarkedFunction) -> Callable[..., Any]:
    """A replacement for a marked linear attention: o like v, and the final state where it is asked for."""

    def linear_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = linear_attention_arguments(marked.function, args, kwargs)
        q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
        b, t, hk, dk = k.shape
        hv, dv = v.shape[2], v.shape[3]
        state = bool(given.get("output_final_state", False))
        # two grams and P V' inside a chunk of 64, three products with the state between chunks
        flops = b * t * hv * 2.0 * (2 * 64 * dk + 64 * dv + 3 * dk * dv)
        moved = tensor_bytes((q, k, v, g, beta)) + tensor_bytes((v,))
        call = LeafCall(
            kind="linear_attention",
            name=marked.kernel,
            shapes=tuple(tuple(x.shape) for x in (q, k, v, g, beta)),
            flops=flops,
            backward_flops=3 * flops,
            bytes_moved=moved,
            backward_bytes=2 * moved,
            facts={
                "marked": marked,
                "key_heads": hk,
                "value_heads": hv,
                "key_dim": dk,
                "value_dim": dv,
                "decay": "channel" if g.dim() == 4 else "head",
                "qk_l2norm": bool(given.get("use_qk_l2norm_in_kernel", False)),
                "scale": given.get("scale"),
                "dtypes": {n: str(given[n].dtype) for n in ("q", "k", "v", "g", "beta")},
            },
        )

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.empty_like(v), v.new_empty(b, hv, dk, dv, dtype=torch.float32)

        out, final = run_leaf(sink, call, make, q, k, v, g, beta)
        return out, final if state else None

    return linear_attention


def state_space_leaf(sink: Any, marked: MarkedFunction) -> Callable[..., Any]:
    """A replacement for Mamba-2's scan: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N] -> like x."""
    signature = inspect.signature(marked.function)

    def state_space(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        x = given[next(iter(signature.parameters))]
        dt, a, b, c = (given[name] for name in ("dt", "A", "B", "C"))
        batch, tokens, heads, head_dim = x.shape
        groups, state = b.shape[2], b.shape[3]
        # a gram and P V inside a chunk of 64, two products with the state between chunks
        flops = batch * tokens * heads * 2.0 * (64 * state + 64 * head_dim + 2 * state * head_dim)
        moved = tensor_bytes((x, dt, b, c)) + tensor_bytes((x,))
        extra = tuple(t for n in ("D", "dt_bias") if isinstance(t := given.get(n), torch.Tensor))
        call = LeafCall(
            kind="state_space",
            name=marked.kernel,
            shapes=tuple(tuple(t.shape) for t in (x, dt, b, c)),
            flops=flops,
            backward_flops=3 * flops,
            bytes_moved=moved,
            backward_bytes=2 * moved,
            facts={
                "marked": marked,
                "key_heads": groups,
                "value_heads": heads,
                "key_dim": state,
                "value_dim": head_dim,
                "dtype": str(x.dtype),
                "dt_softplus": bool(given.get("dt_softplus", False)),
                "skip": given.get("D") is not None,
                "dt_bias": given.get("dt_bias") is not None,
            },
        )

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.empty_like(x), x.new_empty(batch, heads, head_dim, state, dtype=torch.float32)

        out, final = run_leaf(sink, call, make, x, dt, a, b, c, *extra)
        return (out, final) if given.get("return_final_states", False) else out

    return state_space


def short_convolution_leaf(sink: Any, marked: MarkedFunction) -> Callable[..., Any]:
    """A replacement for a marked causal filter: x [B, D, T], weight [D, W] -> [B, D, T]."""

    def short_convolution(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = short_convolution_arguments(marked.function, args, kwargs)
        x, weight, bias, activation = (given[name] for name in ("x", "weight", "bias", "activation"))
        tensors = tuple(t for t in (x, weight, bias) if t is not None)
        moved = 2 * tensor_bytes((x,))
        flops = 2.0 * x.numel() * weight.shape[-1]
        call = LeafCall(
            kind="short_convolution",
            name=marked.kernel,
            # channels last, as the operator sees them: its rows are tokens
            shapes=((x.shape[0], x.shape[2], x.shape[1]), *(tuple(t.shape) for t in tensors[1:])),
            flops=flops,
            backward_flops=2 * flops,
            bytes_moved=moved,
            backward_bytes=1.5 * moved,
            facts={
                "marked": marked,
                "channels": x.shape[1],
                "width": weight.shape[-1],
                "activation": activation,
                "bias": bias is not None,
                "dtype": str(x.dtype),
            },
        )
        out: torch.Tensor = run_leaf(sink, call, lambda: torch.empty_like(x), *tensors)
        return out

    return short_convolution


def _own_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Stacked experts that loop on their own instead of asking the interface: called with tokens, indices, weights."""
    for module in model.modules():
        stacked = sum(p.dim() == 3 for p in module.parameters(recurse=False))
        if stacked < 2 or hasattr(module, "is_concatenated"):
            continue
        names = list(inspect.signature(module.forward).parameters)
        if len(names) == 3 and any("ind" in name or "expert" in name for name in names[1:]):
            yield module


def own_experts_leaf(module: nn.Module, experts: Callable[..., Any]) -> Callable[..., Any]:
    """The experts leaf as the forward of one module; the integer tensor is the index, in whatever order it comes."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden, *routing = (*args, *kwargs.values())
        index = next(t for t in routing if not t.is_floating_point())
        weights = next(t for t in routing if t.is_floating_point())
        return experts(module, hidden, index, weights)

    return forward


Replace = Callable[[MarkedFunction], Callable[..., Any] | None]
"""What to put in the place of a marked function of another kind; None leaves it as it is."""


@contextmanager
def leaves_in_place(model: nn.Module, sink: Any, replace: Replace) -> Iterator[None]:
    """Route every marked function of the model's files and both interfaces to leaves."""
    experts = experts_leaf(sink)

    def attention(_interface: Any, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        own = default if implementation in (None, "eager") else None
        return attention_leaf(sink, implementation or "eager", own)

    with ExitStack() as stack:
        stack.enter_context(patch.object(AttentionInterface, "get_interface", attention))
        # one whole sequence without padding: what transformers finds by values, which fake tensors do not have, and
        # what lets SDPA do without a mask tensor
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None))
        stack.enter_context(patch.object(masking_utils, "is_tracing", lambda *_: False))
        stack.enter_context(patch.object(ExpertsInterface, "get_interface", lambda *_: experts))
        direct = torch_attention_leaf(model, sink, attention_leaf(sink, "sdpa"))
        for module, name in [(F, "scaled_dot_product_attention"), *names_of_torch_attention(modeling_modules(model))]:
            stack.enter_context(patch.object(module, name, direct))
        for stacked in _own_experts(model):
            stack.enter_context(patch.object(stacked, "forward", own_experts_leaf(stacked, experts)))
        for module in modeling_modules(model):
            for marked in (*marked_functions(module), *own_loops(module), *own_loops(module, forwards=True)):
                if is_linear_attention(marked.function):
                    leaf: Callable[..., Any] | None = linear_attention_leaf(sink, marked)
                elif is_state_space(marked.function):
                    leaf = state_space_leaf(sink, marked)
                elif is_short_convolution(marked.function):
                    leaf = short_convolution_leaf(sink, marked)
                else:
                    leaf = replace(marked)
                if leaf is not None:
                    stack.enter_context(patch.object(marked.module, marked.attribute, leaf))
            for attribute in rotary_functions(module):
                stack.enter_context(patch.object(module, attribute, observed(sink, module, attribute)))
        yield
