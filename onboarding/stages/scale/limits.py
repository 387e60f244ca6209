"""How many devices one model can use: what ends the curve before the hardware does. Free of torch."""

from __future__ import annotations

from onboarding.stages.scale.result import Hardware
from onboarding.step_time.work import Work

LARGEST_BATCH = 67_108_864
"""Tokens of one step of the largest batch among published runs of such models (Kimi K2, technical report, section 2.5:
67 M; DeepSeek-V3: 15,360 x 4,096 = 63 M). Nothing published says that a larger one trains as well."""
LARGEST_RUN = 1024
"""Devices of the largest run that the step-time model was fitted on."""
LOSS = 2.0
"""Nats a token: at what loss the critical batch is told."""
FEW_ROWS = 128
"""Rows of an expert below which its product is bound by reading weights: one tile of the matrix units."""
ACCUMULATED = (4, 2, 1)
"""Micro-batches of one step on each device; the first that keeps the step below the critical batch."""


def critical_batch(loss: float = LOSS) -> float:
    """Tokens a step at which twice the fewest steps and twice the fewest tokens are needed for a loss.

    2.1e8 / L^(1 / 0.21): Kaplan et al. 2020, "Scaling laws for neural language models", eq. 1.4. To reach the loss,
    batches of B tokens need 1 + B / B_crit times the fewest tokens (McCandlish et al. 2018, eq. 2.7).
    """
    return float(2.1e8 / loss ** (1 / 0.21))


def accumulated(devices: int, microbatch: int, tokens: int) -> int:
    """Micro-batches of one step on each device."""
    one = devices * microbatch * tokens
    return next((n for n in ACCUMULATED if n * one <= critical_batch()), 1)


def usable(devices: int, microbatch: int, tokens: int) -> int:
    """Devices that a step can keep busy: each takes one micro-batch, all together at most the largest batch."""
    return max(1, min(devices, LARGEST_BATCH // (microbatch * tokens)))


def limited(asked: Hardware, microbatch: int, tokens: int) -> Hardware:
    """The whole nodes among those asked for that are of use; at least one."""
    nodes = max(1, usable(asked.devices, microbatch, tokens) // asked.per_node)
    return asked.model_copy(update={"nodes": min(asked.nodes, nodes)})


def remarks(asked: Hardware, planned: Hardware, work: Work, *, microbatch: int, tokens: int, ep: int) -> list[str]:
    """What the model does not gain from so many devices; empty where nothing stands against them.

    Args:
        asked: the job's nodes.
        planned: those that are of use.
        work: of the model.
        microbatch: sequences that a device runs at a time.
        tokens: of one sequence.
        ep: ranks of an expert group in the chosen layout.
    """
    found = []
    batch = accumulated(planned.devices, microbatch, tokens) * planned.devices * microbatch * tokens
    if planned.devices < asked.devices:
        found.append(
            f"Only {planned.devices:,} of {asked.devices:,} devices are of use: with one micro-batch on each of them a "
            f"step takes {batch / 1e6:.0f} million tokens, and no published run took more than "
            f"{LARGEST_BATCH / 1e6:.0f} million. The plan is for these; on the curve the others stand idle."
        )
    critical = critical_batch()
    if batch > critical:
        found.append(
            f"A step takes {batch / 1e6:.3g} million tokens, above the critical batch (about {critical / 1e6:.2g} "
            f"million at a loss of {LOSS:g}, Kaplan et al. 2020): the same loss needs {1 + batch / critical:.2g} x the "
            "tokens that small batches need, so tokens a second overstate the gain."
        )
    if planned.devices > work.hidden:
        found.append(
            f"Most weights have {work.hidden:,} rows: sharded over {planned.devices:,} ranks they are padded "
            f"{planned.devices / work.hidden:.1f}-fold and gathered so. Replicas (parallel.dp_replicate) of at most "
            f"{work.hidden:,} ranks avoid that."
        )
    if planned.devices > LARGEST_RUN:
        found.append(
            f"The step-time model was fitted on runs of at most {LARGEST_RUN:,} devices, and knows no start-up time of "
            "collectives: beyond that the projection is an extrapolation, and too good."
        )
    if work.experts:
        rows = microbatch * tokens * ep * work.top_k / work.experts
        if rows < FEW_ROWS:
            found.append(
                f"An expert gets {rows:.0f} rows of a micro-batch: its products are bound by reading weights. A larger "
                "micro-batch or expert group helps."
            )
    return found
