"""The memory budget of one rank of a large job, in three tiers, from the parsed architecture alone. Free of torch.

It follows what the runtime does: all weights sharded over all ranks (experts: over their group, and within it); two
blocks gathered at one time; AdamW with float32 moments; adapters on a frozen bfloat16 base, or float32 weights that are
gathered in bfloat16; every block recomputed; checkpoints of what is trained, copied to host memory first.
"""

from __future__ import annotations

from onboarding.architecture import Architecture
from onboarding.stages.scale.result import Budget, Hardware, Mode
from onboarding.step_time.work import Work

RANK = 16
"""Of the adapters."""
KEPT_CHECKPOINTS = 2
LOSS_CHUNK = 1024
"""Tokens whose logits exist at one time."""
ROOM = 0.92
"""Share of a device's memory that a plan may fill: the rest goes to CUDA's context, NCCL and fragmentation."""


def adapter_parameters(architecture: Architecture, work: Work) -> int:
    """Of rank-16 adapters: r (in + out) for every linear layer of the blocks, r (2 in + 3 inner) for each routed expert
    (its gate and up are one matrix)."""
    tokens, linear = architecture.sequence_length, 0.0
    for row in architecture.graph:
        entering = row.shapes.partition(",")[0].split("x")[-1]
        if row.phase != "forward" or not row.block or row.use or row.role == "router" or not entering.isdigit():
            continue
        if row.name in ("mm", "addmm", "linear"):
            linear += RANK * (row.count * int(entering) + row.flops / (2.0 * tokens * int(entering)))
    if not linear:  # an architecture without a graph: four square matrices a layer
        linear = work.layers * 4 * RANK * 2 * work.hidden
    return int(linear + work.moe_layers * work.experts * RANK * (2 * work.routed_width + 3 * work.expert_width))


def budget(
    architecture: Architecture, work: Work, hardware: Hardware, mode: Mode, *, ep: int, microbatch: int, tokens: int
) -> Budget:
    """Bytes by purpose.

    Args:
        architecture: with its census, and its activations' law of growth where it was traced.
        work: the same model's sizes.
        hardware: the devices.
        mode: what is trained.
        ep: ranks of an expert group.
        microbatch: sequences at a time.
        tokens: of one sequence.
    """
    ranks, total = hardware.devices, architecture.census.total
    trained = adapter_parameters(architecture, work) if mode == "adapters" else total
    width, moments = 4, 8  # adapters are float32 too
    device = {
        "weights": (2 * total + width * trained) // ranks if mode == "adapters" else width * total // ranks,
        "gradients": width * trained // ranks,
        "optimizer": moments * trained // ranks,
        "gathered weights": int(2 * 2 * work.largest_block(ep)),
        "activations": int(microbatch * kept_activations(architecture, work, tokens)),
        "logits": min(LOSS_CHUNK, tokens * microbatch) * work.vocabulary * (2 * 2 + 4 + 4),
    }
    if ep > 1:
        # a send and a receive buffer for dispatch and for combine, bfloat16
        device["communication buffers"] = int(4 * 2 * microbatch * tokens * work.routed_width * work.top_k)
    saved = (width + moments) * trained
    return Budget(
        device=device,
        host={"checkpoint copy": saved // ranks},
        disk={
            "checkpoints": (KEPT_CHECKPOINTS + 1) * saved,
            "result": width * trained,
        },
        device_available=int(ROOM * hardware.memory_bytes),
    )


def kept_activations(architecture: Architecture, work: Work, tokens: int) -> float:
    """Bytes of one sequence with every block recomputed: block inputs, and one block whole.

    The traced law holds the logits of a whole sequence too; the runtime makes them in chunks, so they are taken out.
    """
    inputs = 2.0 * tokens * work.hidden * work.layers
    if architecture.memory is None:
        return inputs + 34.0 * 2 * tokens * work.hidden  # Korthikanti et al. 2022, eq. 1, without the score matrix
    logits = (2 + 4) * tokens * work.vocabulary
    return max(inputs, architecture.memory.recomputed.at(tokens) - logits)
