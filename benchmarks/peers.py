"""The peers: how others' kernels are called on a benchmark's inputs. Each import is the peer's own business.

A peer that is not installed, or that refuses to run, is reported as such and holds up nobody else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import Benchmark

Inputs = dict[str, Any]
Call = Callable[[], Tensor]


def _imported(module: str, name: str) -> Any:
    """A name of a package that need not be installed."""
    return getattr(importlib.import_module(module), name)


def torch_rms_norm(benchmark: Benchmark, t: Inputs) -> Call:
    """torch.nn.functional.rms_norm."""
    spec: Any = benchmark.spec
    return lambda: torch.nn.functional.rms_norm(t["x"], (spec.hidden,), t["weight"], spec.eps)


def liger_rms_norm(benchmark: Benchmark, t: Inputs) -> Call:
    """Liger's RMSNorm, not in place."""
    function = _imported("liger_kernel.ops", "LigerRMSNormFunction")

    spec: Any = benchmark.spec
    return lambda: function.apply(t["x"], t["weight"], spec.eps, 0.0, "llama", False)


def liger_swiglu(benchmark: Benchmark, t: Inputs) -> Call:
    """Liger's silu(gate) * up."""
    function = _imported("liger_kernel.ops", "LigerSiLUMulFunction")

    return lambda: function.apply(t["gate"], t["up"])


def fla_rms_norm_gated(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's gated norm."""
    rms_norm_gated = _imported("fla.modules.fused_norm_gate", "rms_norm_gated")

    spec: Any = benchmark.spec
    return lambda: rms_norm_gated(t["x"], t["gate"], t["weight"], None, activation=spec.gate, eps=spec.eps)


def fla_causal_conv1d(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's causal_conv1d with its Triton kernels."""
    causal_conv1d = _imported("fla.modules.conv", "causal_conv1d")

    spec: Any = benchmark.spec
    activation = None if spec.activation == "none" else spec.activation
    return lambda: causal_conv1d(t["x"], t["weight"], t.get("bias"), activation=activation)[0]


def torch_conv1d(benchmark: Benchmark, t: Inputs) -> Call:
    """torch's conv1d and silu as transformers calls them, on channels-last memory."""
    spec: Any = benchmark.spec
    functional = torch.nn.functional

    def call() -> Tensor:
        x, width = t["x"].transpose(1, 2), spec.width
        y = functional.conv1d(x, t["weight"].unsqueeze(1), t.get("bias"), padding=width - 1, groups=spec.channels)
        y = y[..., : x.shape[-1]]
        return (functional.silu(y) if spec.activation == "silu" else y).transpose(1, 2)

    return call


def transformers_hyper_connection(benchmark: Benchmark, t: Inputs) -> Call:
    """transformers' own module of GLM-5.3-Flash, eager; what it collapses to."""
    module = _hyper_connection(benchmark)
    parameters = {name: t[name] for name in ("fn", "base", "scale")}
    return lambda: torch.func.functional_call(module, parameters, (t["x"],))[2]


def compiled_hyper_connection(benchmark: Benchmark, t: Inputs) -> Call:
    """The same through torch.compile."""
    module = _hyper_connection(benchmark)
    parameters = {name: t[name] for name in ("fn", "base", "scale")}
    compiled = torch.compile(lambda x: torch.func.functional_call(module, parameters, (x,))[2])
    return lambda: compiled(t["x"])


def _hyper_connection(benchmark: Benchmark) -> torch.nn.Module:
    spec: Any = benchmark.spec
    make = _imported("transformers.models.glm5_next.modeling_glm5_next", "Glm5NextTextHyperConnection")
    config = SimpleNamespace(
        hc_mult=spec.streams,
        hidden_size=spec.hidden,
        hc_eps=spec.floor,
        rms_norm_eps=spec.eps,
        hc_sinkhorn_iters=spec.rounds,
    )
    module: torch.nn.Module = make(config)
    return module


def transformers_grouped_mm(benchmark: Benchmark, t: Inputs) -> Call:
    """transformers' grouped_mm experts on the same weights."""
    from transformers.integrations import moe

    module = SimpleNamespace(
        num_experts=t["gate_up"].shape[0],
        gate_up_proj=t["gate_up"],
        down_proj=t["down"],
        act_fn=torch.nn.functional.silu,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
    )
    module._apply_gate = lambda gate_up: moe._default_apply_gate(module, gate_up)
    return lambda: moe.grouped_mm_experts_forward(module, t["x"], t["index"], t["scores"])


def fla_kda(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's chunk_kda; tunes itself for about a minute on first use."""
    chunk_kda = _imported("fla.ops.kda", "chunk_kda")

    return lambda: chunk_kda(t["q"], t["k"], t["v"], t["g"], t["beta"], use_qk_l2norm_in_kernel=True)[0]


def fla_gated_delta_rule(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's chunk_gated_delta_rule; refuses on Hopper with Triton 3.4 to 3.7.0."""
    chunk_gated_delta_rule = _imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")

    return lambda: chunk_gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], use_qk_l2norm_in_kernel=True)[0]


def liger_fused_linear_cross_entropy(benchmark: Benchmark, t: Inputs) -> Call:
    """Liger's loss over chunks of rows."""
    function = _imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

    def call() -> Tensor:
        found = function(t["x"], t["weight"], t["target"])
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    return call


def fla_fused_linear_cross_entropy(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's loss over chunks of rows."""
    loss = _imported("fla.modules.fused_linear_cross_entropy", "FusedLinearCrossEntropyLoss")()

    return lambda: loss(t["x"], t["target"], t["weight"])


def compiled_cross_entropy(benchmark: Benchmark, t: Inputs) -> Call:
    """torch's linear and cross_entropy, compiled."""

    @torch.compile
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)

    return lambda: loss(t["x"], t["weight"], t["target"])


def torch_layer_norm(benchmark: Benchmark, t: Inputs) -> Call:
    """torch.nn.functional.layer_norm."""
    spec: Any = benchmark.spec
    return lambda: torch.nn.functional.layer_norm(t["x"], (spec.hidden,), t["weight"], t["bias"], spec.eps)


def torch_rotary(benchmark: Benchmark, t: Inputs) -> Call:
    """The family's definition in torch's dtype of storage, as transformers has it."""
    spec: Any = benchmark.spec

    def call() -> Tensor:
        q = t["q"]
        if spec.norm:
            q = torch.nn.functional.rms_norm(q, (spec.head_dim,), t["q_weight"], spec.eps)
        a, b = q.chunk(2, dim=-1)
        turned: Tensor = q * t["cos"].unsqueeze(2) + torch.cat([-b, a], dim=-1) * t["sin"].unsqueeze(2)
        return turned

    return call


def compiled_rotary(benchmark: Benchmark, t: Inputs) -> Call:
    """The same, compiled."""
    return torch.compile(torch_rotary(benchmark, t))


def torch_routing(benchmark: Benchmark, t: Inputs) -> Call:
    """DeepSeek's router after its linear layer, as transformers has it."""
    spec: Any = benchmark.spec

    def call() -> Tensor:
        scores = torch.sigmoid(t["logits"])
        index = torch.topk(scores + t["bias"], spec.top_k, dim=-1, sorted=False).indices
        weights: Tensor = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * float(spec.scale)

    return call


def compiled_routing(benchmark: Benchmark, t: Inputs) -> Call:
    """The same, compiled."""
    return torch.compile(torch_routing(benchmark, t))


INDEXER_ROWS, GATHER_ROWS = 256, 64
"""Queries that torch's indexer scores at once, and whose chosen keys it gathers at once."""


def torch_indexer(benchmark: Benchmark, t: Inputs) -> Call:
    """Chunks of einsum, relu, weighted sum and topk; for the gradient the chosen keys are gathered and scored again."""
    spec: Any = benchmark.spec
    checkpoint = _imported("torch.utils.checkpoint", "checkpoint")

    def scored(q: Tensor, weights: Tensor, k: Tensor, equation: str) -> Tensor:
        z = torch.relu(torch.einsum(equation, q, k))
        scores: Tensor = torch.einsum("sht,sh->st", z, weights).float() * spec.head_dim**-0.5
        return scores

    def gathered(q: Tensor, weights: Tensor, k: Tensor, index: Tensor) -> Tensor:
        return scored(q, weights, k[index], "shd,std->sht")

    def call() -> Tensor:
        q, k, weights = t["q"][0], t["k"][0], t["weights"][0]
        slots = min(spec.top_k, k.shape[0])
        at = torch.arange(k.shape[0], device=k.device)
        parts = []
        for first in range(0, q.shape[0], INDEXER_ROWS):
            rows = slice(first, first + INDEXER_ROWS)
            with torch.no_grad():
                scores = scored(q[rows], weights[rows], k, "shd,td->sht")
                index = scores.masked_fill_(at >= t["end"][0, rows, None], float("-inf")).topk(slots, dim=-1).indices
            if not torch.is_grad_enabled():
                parts.append(scores.gather(-1, index))
                continue
            for some in range(0, index.shape[0], GATHER_ROWS):
                few = slice(first + some, min(first + some + GATHER_ROWS, q.shape[0]))
                chosen = index[some : some + GATHER_ROWS]
                parts.append(checkpoint(gathered, q[few], weights[few], k, chosen, use_reentrant=False))
        return torch.cat(parts).unsqueeze(0)

    return call


def compiled_kl_divergence(benchmark: Benchmark, t: Inputs) -> Call:
    """The objective's definition, compiled."""

    @torch.compile
    def loss(scores: Tensor, target: Tensor, count: Tensor) -> Tensor:
        used = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
        log_q = scores.masked_fill(~used, float("-inf")).log_softmax(-1)
        p = target.masked_fill(~used, 0.0)
        p = p / p.sum(-1, keepdim=True)
        return torch.where(p > 0, p * (p.clamp_min(1e-38).log() - log_q), 0.0).sum(-1)

    return lambda: loss(t["scores"], t["target"], t["count"])


def fla_attention_residual(benchmark: Benchmark, t: Inputs) -> Call:
    """flash-linear-attention's fused_attnres on the list of sources; releases up to 0.6.0 may not have it."""
    fused_attnres = _imported("fla.ops.attnres", "fused_attnres")

    spec: Any = benchmark.spec
    weight = torch.ones_like(t["query"])
    sources = [t[f"v{i}"] for i in range(spec.sources)]

    def call() -> Tensor:
        found = fused_attnres(t["query"], sources, weight, rms_eps=spec.eps, scale=spec.scale)
        h: Tensor = found[0] if isinstance(found, tuple) else found
        return h

    return call


def compiled_attention_residual(benchmark: Benchmark, t: Inputs) -> Call:
    """The definition in fp32, compiled."""
    spec: Any = benchmark.spec

    @torch.compile
    def read(query: Tensor, *sources: Tensor) -> Tensor:
        scores = torch.stack([
            torch.nn.functional.rms_norm(v.float(), (spec.hidden,), None, spec.eps) @ query.float() for v in sources
        ])  # fmt: skip
        p = (spec.scale * scores).softmax(0)
        h = sum(
            (p[i].unsqueeze(-1) * v.float() for i, v in enumerate(sources)), start=torch.zeros_like(sources[0]).float()
        )
        return h.to(sources[0].dtype)

    return lambda: read(t["query"], *[t[f"v{i}"] for i in range(spec.sources)])


def _joined(t: Inputs, kind: str) -> Tensor:
    """q or k with its rotary part behind it."""
    joined: Tensor = torch.cat([t[kind], t[f"{kind}_rope"]], -1) if f"{kind}_rope" in t else t[kind]
    return joined


def _in_chunks(rows: int, tokens: int, function: Callable[[slice], Tensor]) -> Tensor:
    """The results of ``rows`` queries at a time; backward computes a chunk again rather than keep its scores."""
    checkpoint = _imported("torch.utils.checkpoint", "checkpoint")
    chunks = [slice(first, min(first + rows, tokens)) for first in range(0, tokens, rows)]
    return torch.cat([checkpoint(function, chunk, use_reentrant=False) for chunk in chunks])


def torch_gathered_attention(benchmark: Benchmark, t: Inputs) -> Call:
    """Each query's keys are gathered into a copy; two batched products; one key head."""
    spec: Any = benchmark.spec
    scale = spec.scale or (spec.key_dim + spec.rope_dim) ** -0.5
    gone, index = (t["index"] < 0)[:, None], t["index"].clamp_min(0).long()

    def call() -> Tensor:
        q, k = _joined(t, "q"), _joined(t, "k")[:, 0]

        def chunk(rows: slice) -> Tensor:
            near = k[index[rows]]
            scores = torch.einsum("thd,tsd->ths", q[rows], near).float() * scale
            p = scores.masked_fill(gone[rows], float("-inf")).softmax(-1).to(q.dtype)
            return torch.einsum("ths,tsd->thd", p, near[..., : spec.value_dim])

        return _in_chunks(GATHER_ROWS, q.shape[0], chunk)

    return call


def torch_masked_attention(benchmark: Benchmark, t: Inputs) -> Call:
    """torch's scaled_dot_product_attention over all keys with a mask; one key head, so heads are rows."""
    spec: Any = benchmark.spec
    scale = spec.scale or (spec.key_dim + spec.rope_dim) ** -0.5
    keys = t["k"].shape[0]
    listed = torch.where(t["index"] < 0, keys, t["index"]).long()
    seen = torch.zeros(listed.shape[0], keys + 1, dtype=torch.bool, device=listed.device)
    seen = seen.scatter_(1, listed, True)[:, :keys]

    def call() -> Tensor:
        q, k = _joined(t, "q"), _joined(t, "k")[:, 0]

        def chunk(rows: slice) -> Tensor:
            flat = q[rows].flatten(0, 1)
            mask = seen[rows].repeat_interleave(q.shape[1], 0)
            o = torch.nn.functional.scaled_dot_product_attention(
                flat[None], k[None], k[None, :, : spec.value_dim], attn_mask=mask[None], scale=scale
            )
            heads: Tensor = o[0].view(-1, q.shape[1], spec.value_dim)
            return heads

        return _in_chunks(INDEXER_ROWS, q.shape[0], chunk)

    return call


def compiled_compression(benchmark: Benchmark, t: Inputs) -> Call:
    """Pools of tokens averaged as transformers does, compiled; every pool is complete."""
    spec: Any = benchmark.spec

    @torch.compile
    def pooled(k: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        shares = (gate.unflatten(1, (-1, spec.pool)).float() + bias.float()).softmax(2).to(k.dtype)  # type: ignore[no-untyped-call]
        found: Tensor = (shares * k.unflatten(1, (-1, spec.pool))).sum(2)  # type: ignore[no-untyped-call]
        return found

    return lambda: pooled(t["k"], t["gate"], t["bias"])


PEERS: dict[str, Callable[[Benchmark, Inputs], Call]] = {
    "torch.rms_norm": torch_rms_norm,
    "torch.layer_norm": torch_layer_norm,
    "torch.rotary": torch_rotary,
    "torch.compile.rotary": compiled_rotary,
    "torch.routing": torch_routing,
    "torch.compile.routing": compiled_routing,
    "torch.indexer": torch_indexer,
    "torch.compile.kl_divergence": compiled_kl_divergence,
    "torch.compile.compression": compiled_compression,
    "torch.gathered_attention": torch_gathered_attention,
    "torch.masked_attention": torch_masked_attention,
    "fla.attention_residual": fla_attention_residual,
    "torch.compile.attention_residual": compiled_attention_residual,
    "liger.fused_linear_cross_entropy": liger_fused_linear_cross_entropy,
    "fla.fused_linear_cross_entropy": fla_fused_linear_cross_entropy,
    "torch.compile.cross_entropy": compiled_cross_entropy,
    "liger.rms_norm": liger_rms_norm,
    "liger.swiglu": liger_swiglu,
    "fla.rms_norm_gated": fla_rms_norm_gated,
    "fla.causal_conv1d": fla_causal_conv1d,
    "torch.conv1d": torch_conv1d,
    "transformers.hyper_connection": transformers_hyper_connection,
    "torch.compile.hyper_connection": compiled_hyper_connection,
    "transformers.grouped_mm": transformers_grouped_mm,
    "fla.kda": fla_kda,
    "fla.gated_delta_rule": fla_gated_delta_rule,
}
