"""Who serves an operator today, and how fast: measured where a measurement exists, else assumed and labelled so."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_templates.linear_cross_entropy.spec import Spec as LossSpec
from kernel_templates.moe.spec import Spec as MoeSpec
from kernel_templates.spec import DTYPE_BYTES, OperatorSpec
from onboarding.architecture import OperatorUse
from onboarding.devices import Device

LAUNCH_US = 5.0
"""Host time of one eager operator: what many small operators cannot go below."""
EAGER_BANDWIDTH = 0.85
"""Share of the copy bandwidth that torch's elementwise kernels reach (assumed)."""
LINEAR_EFFICIENCY = 0.8
MASKED_ATTENTION_EFFICIENCY = 0.26
"""Of the whole square of scores: measured on H200, attention with a dense mask, 64 heads of 256, T 8192: 84.8 ms."""


@dataclass(frozen=True, kw_only=True)
class GroupedRun:
    """One measured run of transformers' grouped_mm experts, forward and backward, on the H200."""

    hidden: int
    intermediate: int
    rows_per_expert: float
    tflops: float


GROUPED_MM = (
    GroupedRun(hidden=2304, intermediate=1024, rows_per_expert=8192 * 8 / 256, tflops=264),
    GroupedRun(hidden=4096, intermediate=2048, rows_per_expert=4096 * 8 / 288, tflops=213),
    GroupedRun(hidden=1024, intermediate=512, rows_per_expert=8192 * 16 / 896, tflops=150),
    GroupedRun(hidden=2048, intermediate=768, rows_per_expert=16384 * 8 / 128, tflops=291),
)
H200_MATMUL_TFLOPS = 685.0
KDA_LIBRARY = "fla's chunk_kda, measured on H200 for 32 heads of 128 at T 8192: 5.13 ms a call"
GDN_LIBRARY = "fla refuses the gated delta rule on Hopper with Triton 3.4 to 3.7.0"


@dataclass(frozen=True, kw_only=True)
class Provided:
    """A provider and its time for all calls of an operator, forward and backward."""

    provider: str
    ms: float
    basis: str


def eager_ms(device: Device, operators: int, flops: float, bytes_moved: float) -> float:
    """Milliseconds of unfused torch operators: their bytes and FLOPs, and a launch each."""
    return max(device.floor_ms(flops / LINEAR_EFFICIENCY, bytes_moved / EAGER_BANDWIDTH), operators * LAUNCH_US / 1e3)


def serve_use(use: OperatorUse, spec: OperatorSpec, device: Device, tokens: int, floor_ms: float) -> Provided:
    """Who runs an operator spec today in torch and transformers alone."""
    if isinstance(spec, MoeSpec):
        return _grouped_mm(spec, tokens, floor_ms)
    if isinstance(spec, LossSpec):
        return _loss(use, spec, device, tokens)
    if spec.family == "sparse_attention":
        basis = (
            f"every score is computed under a dense mask: {MASKED_ATTENTION_EFFICIENCY:.0%} of peak, measured on H200"
        )
        ms = 1e3 * use.eager_flops / (device.tflops * 1e12 * MASKED_ATTENTION_EFFICIENCY)
        return Provided(provider="torch sdpa with a dense mask", ms=max(floor_ms, ms), basis=basis)
    ms = max(floor_ms, eager_ms(device, use.eager_operators, use.eager_flops, use.eager_bytes))
    what = (
        f"{use.eager_operators:,} torch operators, {use.eager_bytes / 1e9:,.1f} GB, counted in the trace; "
        f"at {EAGER_BANDWIDTH:.0%} of {device.bandwidth:g} TB/s and at least {LAUNCH_US:g} us a launch (assumed)"
    )
    if spec.family == "linear_attention":
        library = KDA_LIBRARY if getattr(spec, "decay", "") == "channel" else GDN_LIBRARY
        return Provided(provider="transformers torch fallback", ms=ms, basis=f"{what}. As a library: {library}")
    return Provided(provider="transformers eager", ms=ms, basis=what)


def _loss(use: OperatorUse, spec: LossSpec, device: Device, tokens: int) -> Provided:
    """The products of the head, then softmax and loss over logits in memory, one after the other."""
    logits = tokens * spec.vocabulary * DTYPE_BYTES[spec.dtype]
    # each of the three products reads or writes the logits, x and the weight
    passes = max(0.0, use.eager_bytes - 3 * (logits + use.bytes_moved))
    return Provided(
        provider="transformers eager",
        ms=eager_ms(device, 0, use.eager_flops, 0.0) + eager_ms(device, use.eager_operators, 0.0, passes),
        basis=(
            f"{use.eager_operators:,} torch operators, {passes / 1e9:,.1f} GB beside the products, counted; "
            f"at {LINEAR_EFFICIENCY:.0%} of peak, then {EAGER_BANDWIDTH:.0%} of {device.bandwidth:g} TB/s (assumed)"
        ),
    )


def _grouped_mm(spec: MoeSpec, tokens: int, floor_ms: float) -> Provided:
    rows = tokens * spec.top_k / spec.experts

    def distance(run: GroupedRun) -> float:
        return (
            abs(math.log(run.hidden / spec.hidden))
            + abs(math.log(run.intermediate / spec.intermediate))
            + abs(math.log(run.rows_per_expert / max(rows, 1e-9)))
        )

    nearest = min(GROUPED_MM, key=distance)
    share = nearest.tflops / H200_MATMUL_TFLOPS
    return Provided(
        provider="transformers grouped_mm",
        ms=floor_ms / share,
        basis=(
            f"{share:.0%} of the roofline: measured on H200 at hidden {nearest.hidden}, intermediate "
            f"{nearest.intermediate}, {nearest.rows_per_expert:.0f} rows an expert ({nearest.tflops:g} TFLOP/s); "
            f"here {rows:.0f} rows"
        ),
    )
