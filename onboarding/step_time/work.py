"""What one training step of a model has to do, in the few numbers that the step-time model reads. Free of torch.

FLOPs are of one token's forward pass, a multiply-add counted as two; backward takes twice as much. A causal query sees
(T + 1) / 2 keys on average, so attention's FLOPs are a slope in T and a constant (windows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from onboarding.architecture import Architecture, FeedForwardRole, GraphOperator, OperatorUse

SCANS = ("linear_attention", "state_space")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One model."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    parameters: float
    """All of them."""
    routed_parameters: float = 0.0
    """Of all routed experts."""
    linear_flops: float
    """Products with weights that every token meets: projections, dense and shared feed-forwards, routers, head."""
    attention_slope: float = 0.0
    """FLOPs of scores and values for each key that a token sees, over all layers with full attention."""
    attention_flops: float = 0.0
    """Of attention that does not grow with the sequence: windows, chosen keys."""
    scan_flops: float = 0.0
    """Of recurrences along the sequence (linear attention, state spaces), counted as the recurrence has them: a write
    and a read of the state, 4 d_key d_value a head. Chunked kernels do more; what they reach is measured in these."""
    expert_flops: float = 0.0
    """Products with routed experts' weights."""
    outputs: float = 0.0
    """Numbers that products with shared weights, norms and residual sums write for one token, over all layers."""
    routed_outputs: float = 0.0
    """The same of routed experts: their activations, and the rows on their way in and out."""
    head_dim: int = 128
    """Of queries and keys."""
    moe_layers: int = 0
    experts: int = 0
    """Routed ones of a layer."""
    top_k: int = 0
    expert_width: int = 0
    """Inner width of one routed expert."""
    expert_width_in: int = 0
    """Width that it works in: the model's, or a latent one."""
    block_dense: float = 0.0
    """Parameters of the largest block without routed experts."""
    block_routed: float = 0.0
    """Routed parameters of the largest block."""

    @property
    def routed_width(self) -> int:
        """Numbers that one token sends to one expert."""
        return self.expert_width_in or self.hidden

    def attention(self, tokens: int) -> float:
        """FLOPs of mixing for one token of a causal sequence."""
        return self.attention_slope * (tokens + 1) / 2 + self.attention_flops

    def forward(self, tokens: int) -> float:
        """FLOPs of one token's forward pass."""
        return self.linear_flops + self.expert_flops + self.attention(tokens) + self.scan_flops

    def largest_block(self, ep: int) -> float:
        """Parameters of a block that one rank gathers when experts are spread over ``ep`` ranks."""
        return self.block_dense + self.block_routed / ep


def work_of(architecture: Architecture) -> Work:
    """Read the work off a parsed architecture.

    Args:
        architecture: traced at its ``sequence_length``.
    """
    tokens = architecture.sequence_length
    specs = {use.digest: use.spec for use in architecture.uses}
    scans = {digest for digest, spec in specs.items() if spec.get("family") in SCANS}
    sums = {"linear": 0.0, "attention": 0.0, "experts": 0.0, "scan": 0.0}
    slope = 0.0
    for row in architecture.graph:
        if row.phase != "forward":
            continue
        kind = _kind(row, scans)
        if kind == "attention" and _grows(architecture, row):
            slope += row.flops / tokens / ((tokens + 1) / 2)
        elif kind:
            sums[kind] += row.flops / tokens
    experts = next((spec for spec in specs.values() if spec.get("family") == "moe"), {})
    role = _routed_role(architecture)
    routed = float(architecture.census.by_role.get("routed experts", 0))
    moe_layers = sum(len(b.layers) for b in architecture.blocks if "MoE" in b.feed_forward) if routed else 0
    each = routed / moe_layers if moe_layers else 0.0
    sizes = [(b.parameters - (each if "MoE" in b.feed_forward else 0.0)) for b in architecture.blocks]
    made = Work(
        name=architecture.name,
        layers=architecture.num_layers,
        hidden=architecture.hidden_size,
        vocabulary=architecture.vocab_size,
        parameters=float(architecture.census.total),
        routed_parameters=routed,
        linear_flops=sums["linear"],
        outputs=_outputs(architecture, scans) + 2.0 * architecture.hidden_size * architecture.num_layers,
        routed_outputs=0.0,
        head_dim=_head_dim(architecture),
        attention_slope=slope,
        attention_flops=sums["attention"],
        scan_flops=sum(_scan(use, tokens) for use in architecture.uses if use.digest in scans),
        expert_flops=sums["experts"],
        moe_layers=moe_layers,
        experts=int(experts.get("experts", 0)) or role.experts,
        top_k=int(experts.get("top_k", 0)) or role.top_k,
        expert_width=int(experts.get("intermediate", 0)) or role.width,
        expert_width_in=int(experts.get("hidden", 0)) or role.latent or 0,
        block_dense=max(sizes, default=0.0),
        block_routed=each,
    )
    written = made.moe_layers * made.top_k * (3 * made.expert_width + 2 * made.routed_width)
    return replace(made, routed_outputs=float(written))


def part_of(architecture: Architecture, work: Work, layers: dict[int, int]) -> Work:
    """The same model with fewer layers.

    Args:
        architecture: with its block kinds.
        work: of the whole model.
        layers: how many of each block kind (its place in ``architecture.blocks``).
    """
    blocks = architecture.blocks
    kept = sum(blocks[kind].flops * n for kind, n in layers.items())
    share = kept / max(sum(block.flops * len(block.layers) for block in blocks), 1e-9)
    routed = sum(n for kind, n in layers.items() if "MoE" in blocks[kind].feed_forward)
    of_routed = routed / work.moe_layers if work.moe_layers else 0.0
    head = 2.0 * work.hidden * work.vocabulary
    return replace(
        work,
        layers=sum(layers.values()),
        moe_layers=routed,
        parameters=sum(blocks[kind].parameters * n for kind, n in layers.items()) + head,
        routed_parameters=work.routed_parameters * of_routed,
        linear_flops=(work.linear_flops - head) * share + head,
        attention_slope=work.attention_slope * share,
        attention_flops=work.attention_flops * share,
        scan_flops=work.scan_flops * share,
        expert_flops=work.expert_flops * of_routed,
        outputs=work.outputs * share,
        routed_outputs=work.routed_outputs * of_routed,
    )


def _outputs(architecture: Architecture, scans: set[str]) -> float:
    """Numbers that shared products and scans write for one token; a feed-forward's activation counts as one more."""
    tokens, written = architecture.sequence_length, 0.0
    for row in architecture.graph:
        kind = _kind(row, scans)
        if row.phase != "forward" or kind not in ("linear", "attention", "scan") or row.role == "head":
            continue
        entering = row.shapes.partition(",")[0].split("x")
        if kind == "linear" and entering[-1].isdigit():
            out = row.flops / (2.0 * tokens * int(entering[-1]))
            written += out * (1.5 if row.role in ("dense ffn", "shared experts") else 1.0)
        else:
            written += row.count * architecture.hidden_size * (4.0 if kind == "scan" else 1.0)
    return written


def _head_dim(architecture: Architecture) -> int:
    """Of queries and keys, where the twin's proofs say it."""
    mixers = [m for block in architecture.blocks if block.roles for m in block.roles.mixers]
    return next((mixer.head_dim for mixer in mixers if mixer.head_dim), 128)


def _scan(use: OperatorUse, tokens: int) -> float:
    """FLOPs of one token of a recurrence, over all its layers."""
    sizes = [int(use.spec.get(name) or 0) for name in ("value_heads", "key_dim", "value_dim")]
    return 4.0 * use.calls * math.prod(sizes) if all(sizes) else use.flops / tokens


def _routed_role(architecture: Architecture) -> FeedForwardRole:
    """What the twin's proofs say of routed experts, for those that no operator spec stands for."""
    for block in architecture.blocks:
        for forward in block.roles.feed_forwards if block.roles else ():
            if forward.kind == "experts" and forward.experts:
                return forward
    return FeedForwardRole(kind="dense")


def _kind(row: GraphOperator, scans: set[str]) -> str:
    if row.name == "experts":
        return "experts"
    if row.name.startswith("attention"):
        return "attention"
    if row.use in scans:
        return "scan"
    return "linear" if row.matmul else ""


def _grows(architecture: Architecture, row: GraphOperator) -> bool:
    """Whether an attention row's cost grows with the square of the sequence: its block's law says so."""
    if " window" in row.name or " top " in row.name:
        return False
    laws = [block.growth for block in architecture.blocks if block.letter == row.block and block.growth is not None]
    return not laws or any(law.quadratic > 0 for law in laws)
