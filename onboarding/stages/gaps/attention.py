"""Who runs a softmax attention as its class calls it, and at what speed.

torch's SDPA skips the keys that causality hides. A mask tensor, which transformers makes for windows, for chunks or for
chosen keys, is applied to scores that were all computed. Heads wider than 256 are left to a slow kernel. A class that
supports no SDPA (softcap, sinks) runs its own torch operators on a square of scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onboarding.architecture import GraphOperator
from onboarding.devices import Device
from onboarding.stages.gaps.providers import EAGER_BANDWIDTH, LINEAR_EFFICIENCY, Provided, eager_ms

FAST_ATTENTION = 0.55
"""Share of the roofline, over the scores that count, from which on attention is no gap: what cuDNN's own kernels reach
with heads of 64, their lower end."""
BACKWARD = 2.5
"""Products of the backward over those of the forward: the scores are computed again."""
WIDEST = 256
"""Channels of a head that cuDNN's and FlashAttention's kernels take."""
SINKS_BANDWIDTH = 0.45
"""Of a square of scores with one more column, whose rows are not aligned: 16 bytes are never read at once."""


@dataclass(frozen=True, kw_only=True)
class SdpaRun:
    """One measured run of torch's SDPA, forward and backward, bf16, on the H200."""

    head_dim: int
    value_dim: int
    masked: bool
    """A mask tensor was given: TFLOP/s are those of the whole square of scores."""
    tflops: float


H200_MATMUL_TFLOPS = 685.0
SDPA = (
    SdpaRun(head_dim=64, value_dim=64, masked=False, tflops=414),
    SdpaRun(head_dim=128, value_dim=128, masked=False, tflops=540),
    SdpaRun(head_dim=192, value_dim=128, masked=False, tflops=489),
    SdpaRun(head_dim=256, value_dim=256, masked=False, tflops=428),
    SdpaRun(head_dim=512, value_dim=512, masked=False, tflops=40),
    SdpaRun(head_dim=64, value_dim=64, masked=True, tflops=259),
    SdpaRun(head_dim=128, value_dim=128, masked=True, tflops=308),
    SdpaRun(head_dim=192, value_dim=128, masked=True, tflops=228),
    SdpaRun(head_dim=256, value_dim=256, masked=True, tflops=218),
)
"""``benchmarks/results/h200-2026-12-01-attention-as-called.json``: torch 2.11, cuDNN 9.19, T 8192 (4096 for 512)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one attention call."""

    batch: int
    heads: int
    queries: int
    keys: int
    key_heads: int
    head_dim: int
    value_dim: int

    @property
    def square_flops(self) -> float:
        """Forward FLOPs of every query with every key."""
        return 2.0 * self.batch * self.heads * self.queries * self.keys * (self.head_dim + self.value_dim)


def sizes_of(operator: GraphOperator) -> Sizes:
    """The sizes in an attention's shapes: q [B, H, T, D], k [B, HK, S, D], v [B, HK, S, DV]."""
    query, key, value = ([int(n) for n in shape.split("x")] for shape in operator.shapes.split(", ")[:3])
    return Sizes(
        batch=query[0],
        heads=query[1],
        queries=query[2],
        keys=key[2],
        key_heads=key[1],
        head_dim=query[3],
        value_dim=value[3],
    )


def attention_words(operator: GraphOperator) -> str:
    """E.g. ``attention 16/8 x 256, window 4096, softcap 50``."""
    size, how = sizes_of(operator), operator.attention
    width = f"{size.head_dim}" if size.head_dim == size.value_dim else f"{size.head_dim}/{size.value_dim}"
    parts = [f"attention {size.heads}/{size.key_heads} x {width}"]
    if how is not None:
        parts += [] if how.causal else ["bidirectional"]
        parts += [f"top {how.top_k}"] if how.top_k else []
        parts += [f"window {how.window}"] if how.window else []
        parts += ["mask tensor"] if how.mask and how.implementation != "eager" else []
        parts += [f"softcap {how.softcap:g}"] if how.softcap else []
        parts += ["sinks"] if how.sinks else []
    return ", ".join(parts)


def serve_attention(operators: Sequence[GraphOperator], device: Device, floor_ms: float) -> Provided:
    """Who runs one kind of attention, forward and backward, and how fast.

    Args:
        operators: its rows of the graph, of one size and called in one way.
        device: the target.
        floor_ms: of all its calls, over the scores that count.
    """
    how = operators[0].attention
    if how is not None and how.implementation == "eager":
        return _eager(operators, device)
    masked = how is not None and (how.mask or bool(how.top_k))
    run = nearest(sizes_of(operators[0]), masked=masked)
    share = run.tflops / H200_MATMUL_TFLOPS
    measured = f"{share:.0%} of peak: measured on H200 with heads of {run.head_dim}/{run.value_dim}"
    if masked:
        square = sum(op.count * sizes_of(op).square_flops * (1.0 if _forward(op) else BACKWARD) for op in operators)
        return Provided(
            provider="torch sdpa with a mask tensor",
            ms=max(floor_ms, device.floor_ms(square / share, 0.0)),
            basis=f"every score is computed, then masked; {measured}",
        )
    wide = f"; no fast kernel takes heads wider than {WIDEST}" if run.head_dim > WIDEST else ""
    return Provided(provider="torch sdpa", ms=floor_ms / share, basis=measured + wide)


def nearest(size: Sizes, *, masked: bool) -> SdpaRun:
    """The measured run of the nearest head sizes; one beyond what fast kernels take stands for all such."""

    def distance(run: SdpaRun) -> float:
        return abs(math.log(run.head_dim / size.head_dim)) + abs(math.log(run.value_dim / size.value_dim))

    wide = max(size.head_dim, size.value_dim) > WIDEST
    runs = [run for run in SDPA if run.masked == masked and (run.head_dim > WIDEST) == wide]
    return min(runs or [run for run in SDPA if run.head_dim > WIDEST], key=distance)


def _forward(operator: GraphOperator) -> bool:
    return operator.phase == "forward"


def _eager(operators: Sequence[GraphOperator], device: Device) -> Provided:
    """The class's own operators as they were counted: products, then passes over scores in memory."""
    ran = [(op.count, op.attention) for op in operators if op.attention is not None]
    count = sum(times * how.operators for times, how in ran)
    flops = sum(times * how.flops for times, how in ran)
    moved = sum(times * how.bytes_moved for times, how in ran)
    sinks = any(how.sinks for _, how in ran)
    bandwidth, basis = (SINKS_BANDWIDTH, "measured on H200") if sinks else (EAGER_BANDWIDTH, "assumed")
    return Provided(
        provider="transformers eager attention",
        ms=eager_ms(device, 0, flops, 0.0) + eager_ms(device, count, 0.0, moved * EAGER_BANDWIDTH / bandwidth),
        basis=(
            f"the class supports no SDPA: {count:,} torch operators, {moved / 1e9:,.0f} GB of scores, counted; "
            f"products at {LINEAR_EFFICIENCY:.0%} of peak, then {bandwidth:.0%} of {device.bandwidth:g} TB/s ({basis})"
        ),
    )
