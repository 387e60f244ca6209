"""Input tensors of a benchmark, as the peers' own benchmarks draw them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import Benchmark

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make(benchmark: Benchmark, device: torch.device, seed: int = 0) -> dict[str, Tensor | None]:
    """Inputs by name; those that are not frozen require a gradient."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[benchmark.spec.dtype]

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    draw = {
        "norm": _rows,
        "gated_activation": _rows,
        "short_convolution": _convolution,
        "hyper_connection": _streams,
        "attention_residual": _sources,
        "moe": _experts,
        "linear_cross_entropy": _loss,
        "rotary": _rotary,
        "routing": _routing,
        "indexer": _indexer,
        "linear_attention": _attention,
        "sparse_attention": _sparse_attention,
    }
    tensors = draw[benchmark.spec.family](benchmark, normal)
    for role in benchmark.spec.inputs():
        tensor = tensors.get(role.name)
        if role.differentiable and role.name not in benchmark.frozen and tensor is not None:
            tensor.requires_grad_()
    return tensors


def _rows(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    width = spec.hidden if spec.family == "norm" else spec.width
    shapes = {"weight": (width,), "bias": (width,), "gate_up": (benchmark.tokens, 2 * width)}
    return {r.name: normal(*shapes.get(r.name, (benchmark.tokens, width))) for r in spec.inputs()}


def _convolution(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    x, weight = normal(1, benchmark.tokens, spec.channels), normal(spec.channels, spec.width, scale=spec.width**-0.5)
    return {"x": x, "weight": weight, "cu_seqlens": None}


def _streams(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    size = spec.streams * spec.hidden
    return {
        "x": normal(1, benchmark.tokens, spec.streams, spec.hidden),
        "fn": normal(spec.columns, size, scale=size**-0.5),
        "base": normal(spec.columns, dtype=torch.float32),
        "scale": normal(spec.parts, dtype=torch.float32),
    }


def _sources(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    sources = {f"v{i}": normal(1, benchmark.tokens, spec.hidden) for i in range(spec.sources)}
    return {"query": normal(spec.hidden, scale=spec.hidden**-0.5), **sources}


def _loss(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    rows, hidden, vocabulary = benchmark.tokens, spec.hidden, spec.vocabulary
    x = normal(rows, hidden)
    target = torch.arange(rows, device=x.device) * 7919 % vocabulary
    weight = normal(vocabulary, hidden, scale=hidden**-0.5)
    return {"x": x, "weight": weight, "target": target, "denominator": None}


def _rotary(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    angle = 3.0 * normal(1, benchmark.tokens, spec.rotary_dim // 2, dtype=torch.float32)
    angle = torch.cat([angle, angle], dim=-1)
    q = normal(1, benchmark.tokens, spec.heads, spec.head_dim)
    tensors = {"q": q, "cos": angle.cos().to(q.dtype), "sin": angle.sin().to(q.dtype)}
    return tensors | ({"q_weight": 1.0 + normal(spec.head_dim, scale=0.1)} if spec.norm else {})


def _routing(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    logits = normal(benchmark.tokens, spec.experts)
    bias = normal(spec.experts, scale=0.1, dtype=torch.float32)
    slots = torch.zeros(spec.top_k, dtype=torch.int32, device=logits.device)
    return {"logits": logits, "bias": bias, "slots": slots}


def _indexer(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    tokens, slots = benchmark.tokens, spec.top_k
    at = torch.arange(tokens, dtype=torch.int32)
    if spec.operation == "compression":
        k, gate = (normal(1, tokens, spec.head_dim) for _ in range(2))
        start = torch.arange(0, tokens, spec.pool, dtype=torch.int32, device=k.device).unsqueeze(0)
        return {"k": k, "gate": gate, "bias": normal(spec.pool, spec.head_dim), "start": start}
    if spec.operation == "objective":
        scores = normal(1, tokens, slots, dtype=torch.float32)
        target = spec.heads * normal(1, tokens, slots, dtype=torch.float32).softmax(-1)
        count = (at + 1).clamp_max(slots).unsqueeze(0).to(scores.device)
        return {"scores": scores, "target": target, "count": count}
    q, k = normal(1, tokens, spec.heads, spec.head_dim), normal(1, tokens, spec.head_dim)
    weights = normal(1, tokens, spec.heads, scale=spec.heads**-0.5)
    if tokens <= benchmark.at("reduced").tokens:
        # where numerics are compared: whole numbers, so that no rounding decides between two scores
        q, k, weights = q.round(), k.round(), (16.0 * weights).round() / 16.0
    tensors = {"q": q, "k": k, "weights": weights}
    at = at.unsqueeze(0).to(q.device)
    slot = torch.zeros(slots, dtype=torch.int32, device=q.device)
    return {**tensors, "begin": torch.zeros_like(at), "end": at + 1, "slots": slot}


def _experts(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    tokens, experts, hidden, width = benchmark.tokens, spec.experts, spec.hidden, spec.intermediate
    # a bias by expert: some experts are a few times as popular as others
    logits = normal(tokens, experts, dtype=torch.float32) + 0.5 * normal(experts, dtype=torch.float32)
    scores, index = logits.softmax(-1).topk(spec.top_k, -1)
    x = normal(tokens, hidden)
    return {
        "x": x,
        "index": index,
        "scores": scores.to(x.dtype),
        "gate_up": normal(experts, 2 * width, hidden, scale=hidden**-0.5),
        "down": normal(experts, hidden, width, scale=width**-0.5),
    }


def _attention(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    tokens, heads = benchmark.tokens, spec.value_heads
    channels = (spec.key_dim,) if spec.decay == "channel" else ()
    tensors = {
        "q": normal(1, tokens, spec.key_heads, spec.key_dim),
        "k": normal(1, tokens, spec.key_heads, spec.key_dim),
        "v": normal(1, tokens, heads, spec.value_dim),
        "g": -torch.nn.functional.softplus(normal(1, tokens, heads, *channels, dtype=torch.float32)),
    }
    beta = torch.sigmoid(normal(1, tokens, heads, dtype=torch.float32)).to(tensors["v"].dtype)
    return {**tensors, "beta": beta, "initial_state": None, "cu_seqlens": None}


def _sparse_attention(benchmark: Benchmark, normal: Any) -> dict[str, Tensor | None]:
    spec: Any = benchmark.spec
    tokens, keys = benchmark.tokens, spec.keys or benchmark.tokens
    widths = {
        "q": spec.key_dim,
        "k": spec.key_dim,
        "v": spec.value_dim,
        "q_rope": spec.rope_dim,
        "k_rope": spec.rope_dim,
    }
    tensors: dict[str, Tensor | None] = {}
    for role in spec.inputs():
        if role.name in ("q", "q_rope"):
            tensors[role.name] = normal(tokens, spec.heads, widths[role.name])
        elif role.name in widths:
            tensors[role.name] = normal(keys, spec.kv_heads, widths[role.name])
    if spec.sink:
        tensors["sink"] = normal(spec.heads)
    # distinct random keys among those that each query sees, ascending: the least that neighbours can share
    rows = []
    for first in range(0, tokens, 512):
        score = normal(min(512, tokens - first), keys, dtype=torch.float32)
        at = torch.arange(keys, device=score.device)
        own = torch.arange(first, first + score.shape[0], device=score.device) + keys - tokens
        score.masked_fill_(at > own[:, None], float("-inf"))
        best = score.topk(min(spec.top_k, keys), dim=-1)
        chosen = best.indices.masked_fill_(best.values == float("-inf"), keys).sort(-1).values
        rows.append(chosen.masked_fill_(chosen == keys, -1).to(torch.int32))
    return {**tensors, "index": torch.cat(rows)}
