"""Shapes and inputs on which linear attention is judged, and the shapes on which it is timed.

Decays are drawn as the published models initialise and parametrise them (A_log, dt_bias, softplus, lower bound -5),
because kernels fail on real decays and not on mild ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.linear_attention.spec import Spec

DECAYED = ("real", "bounded", "slow", "strong")
PLAIN = ("real", "correlated", "outlier", "beta_edges", "mean")


def cases(spec: Spec, rng: random.Random, count: int, level: str) -> list[Case]:
    """``count`` cases, most telling first. ``interpreted`` ones are tiny, ``compiled`` ones include the spec's dims."""
    compiled = level == "compiled"
    chunk = 64 if compiled else 16
    group = min(spec.value_heads // spec.key_heads, 4 if compiled else 2)
    own = (spec.key_dim, spec.value_dim) if compiled else (32, 16 if spec.key_dim != spec.value_dim else 32)
    odd = rng.choice(((60, 100), (100, 60), (192, 64), (96, 256))) if compiled else rng.choice(((20, 12), (12, 28)))
    prime = rng.choice((131, 257, 331) if compiled else (37, 41, 53))
    lengths = [0, 1, chunk + 1, chunk, rng.randint(2, chunk - 1), 2 * chunk + 3]
    rng.shuffle(lengths)
    gates = DECAYED if spec.decay != "none" else ("real",)
    # batch, length or lengths of packed sequences, (key, value) dim, distribution, initial state
    fixed: list[tuple[int, int | list[int], tuple[int, int], str, bool]] = [
        (1, 4 * chunk + rng.randint(2, chunk // 2), own, gates[1 % len(gates)], True),
        (1, lengths, own, "real", True),
        (2, prime, odd, rng.choice(gates), False),
        (1, 2 * chunk, own, gates[-1], True),
        (2, chunk + 1, own, "correlated", False),
        (1, chunk - 1, own, "beta_edges" if spec.delta else "outlier", True),
        (1, 1, own, "real", True),
        (1, 0, own, "real", True),
        (1, 5 * chunk, own, "slow" if spec.decay != "none" else "mean", False),
        (1, chunk, odd, "outlier", True),
        (1, 3 * chunk + 1, own, "mean", True),
    ]
    if compiled:
        fixed.insert(1, (1, 16 * chunk + rng.randint(1, chunk - 1), own, "bounded", True))
    while len(fixed) < count:
        length = rng.randint(2, 6 * chunk)
        fixed.append((1, length, rng.choice((own, odd)), rng.choice((*gates, *PLAIN)), rng.random() < 0.5))
    return [_case(spec, i, group, *entry) for i, entry in enumerate(fixed[:count])]


def _case(
    spec: Spec,
    index: int,
    group: int,
    batch: int,
    length: int | list[int],
    dims: tuple[int, int],
    distribution: str,
    state: bool,
) -> Case:
    packed, tokens = (length, sum(length)) if isinstance(length, list) else (None, length)
    words = f"packed {packed}" if packed else f"{batch} x {tokens} tokens"
    key_heads = 1 if spec.key_heads == 1 else 2
    return Case(
        name=f"{index}: {words}, head dims {dims[0]} and {dims[1]}, {distribution}{', state' if state else ''}",
        dims={
            "batch": batch,
            "length": tokens,
            "key_heads": key_heads,
            "value_heads": key_heads * group,
            "key_dim": dims[0],
            "value_dim": dims[1],
        },
        dtype=spec.dtype,
        distribution=distribution,
        options={"initial_state": state, "lengths": packed},
    )


def training_case(spec: Spec, tokens: int) -> Case:
    """What a training step of ``tokens`` tokens hands over, for tuning."""
    dims = {
        "batch": 1,
        "length": tokens,
        "key_heads": spec.key_heads,
        "value_heads": spec.value_heads,
        "key_dim": spec.key_dim,
        "value_dim": spec.value_dim,
    }
    return Case(name=f"{tokens} tokens", dims=dims, dtype=spec.dtype, distribution="real")


def make_tensors(
    spec: Spec, case: Case, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor | None]:
    """q, k, v and beta in ``dtype``; g, log decay, in fp32 at least; initial_state in fp32 at least.

    With no norm inside the operator, q and k come normed: longer keys make the delta rule diverge.
    """
    d = case.dims
    batch, length, heads, key_dim = d["batch"], d["length"], d["value_heads"], d["key_dim"]
    kind = case.distribution

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    q, k = (normal(batch, length, d["key_heads"], key_dim) for _ in range(2))
    v = normal(batch, length, heads, d["value_dim"])
    if kind == "correlated":  # mean cosine between keys about 0.5
        k = k + normal(1, 1, d["key_heads"], key_dim)
    if kind == "outlier":
        q[..., 0], k[..., -1], v[..., 0] = 20.0 * q[..., 0], 20.0 * k[..., -1], 50.0 * v[..., 0]
    if kind == "mean":
        q, v = q + 1.0, v + 2.0
    if not spec.qk_l2norm:
        q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6) for x in (q, k))
    wide = torch.promote_types(dtype, torch.float32)
    tensors: dict[str, Tensor | None] = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if spec.decay != "none":
        channels = (key_dim,) if spec.decay == "channel" else ()
        tensors["g"] = _log_decay(kind, (batch, length, heads, *channels), generator).to(wide)
    if spec.delta:
        logits = normal(batch, length, heads)
        if kind == "beta_edges":
            logits = logits.sign() * (4.0 + 8.0 * logits.abs())
        tensors["beta"] = logits.sigmoid().to(dtype)
    lengths = case.options.get("lengths")
    sequences = len(lengths) if lengths else batch
    tensors["initial_state"] = None
    if case.options.get("initial_state"):
        tensors["initial_state"] = (0.3 * normal(sequences, heads, key_dim, d["value_dim"])).to(wide)
    tensors["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)]) if lengths else None
    return {n: None if t is None else t.to(device) for n, t in tensors.items()}


def _log_decay(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decay g < 0 of ``shape`` [B, T, HV] or [B, T, HV, K], fp32.

    ``bounded``: g = -5 sigmoid(e^A_log (x + dt_bias)) with a lower bound, as GLM-5.3 and Kimi K3 have it. ``slow``: the
    state lives for thousands of tokens. ``strong``: a step forgets everything. Else g = -A softplus(x + dt_bias) with A
    uniform in (1, 16) and softplus(dt_bias) log-uniform in (0.001, 0.1), as Mamba-2, Kimi Linear and Qwen3-Next
    initialise it.
    """

    def uniform(size: tuple[int, ...], low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=generator, device=generator.device)

    x = torch.randn(shape, generator=generator, device=generator.device)
    per_head = (1, 1, shape[2]) + (1,) * (len(shape) - 3)
    rate = uniform(per_head, 1.0, 16.0)
    if kind == "bounded":
        return -5.0 * torch.sigmoid(uniform(per_head, 0.5, 2.0) * x)
    if kind == "slow":
        return -1e-3 * torch.sigmoid(x)
    if kind == "strong":
        return -rate * torch.nn.functional.softplus(x) - 1.0
    step = torch.exp(uniform((1, 1, *shape[2:]), math.log(0.001), math.log(0.1)))
    bias = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    return -rate * torch.nn.functional.softplus(x + bias)


@dataclass(frozen=True, kw_only=True)
class BenchShape:
    """One operator at one size, to be timed forward and backward."""

    name: str
    spec: Spec
    length: int
    """Tokens, batch 1."""

    def tensors(self, device: torch.device | str, seed: int = 0) -> dict[str, Tensor | None]:
        """The operator's inputs in bf16, decays bounded by -5 per channel, as the models initialise them per head."""
        sizes = {"batch": 1, "length": self.length, **self.spec.dims()}
        kind = "bounded" if self.spec.decay == "channel" else "real"
        case = Case(name=self.name, dims=sizes, distribution=kind)
        generator = torch.Generator(device=device).manual_seed(seed)
        return make_tensors(self.spec, case, generator, torch.bfloat16, device)


def bench_shapes() -> list[BenchShape]:
    """Head dim 128 in bf16: the sizes at which other libraries publish their figures."""

    def spec(decay: str, key_heads: int, value_heads: int) -> Spec:
        return Spec(key_heads=key_heads, value_heads=value_heads, key_dim=128, value_dim=128, decay=decay)

    rows = [
        ("kda", "channel", 32, 32, 8192),
        ("kda", "channel", 32, 32, 32768),
        ("gdn", "head", 16, 32, 8192),
        ("gdn", "head", 16, 32, 32768),
        ("gdn", "head", 32, 32, 32768),
    ]
    return [
        BenchShape(name=f"{name} T{length} HK{hk} HV{hv} D128", spec=spec(decay, hk, hv), length=length)
        for name, decay, hk, hv, length in rows
    ]
