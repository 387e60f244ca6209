"""What one training step of a model has to do, in the few numbers that the step-time model reads. Free of torch.

FLOPs are of one token's forward pass, a multiply-add counted as two; backward takes twice as much. A causal query sees
(T + 1) / 2 keys on average, so attention's FLOPs are a slope in T and a constant (windows, linear attention, scans).
"""

from __future__ import annotations

from dataclasses import dataclass

from onboarding.architecture import Architecture, FeedForwardRole, GraphOperator

SCANS = ("linear_attention", "state_space", "short_convolution")


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
    """The part of mixing that does not grow with the sequence."""
    expert_flops: float = 0.0
    """Products with routed experts' weights."""
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
        return self.linear_flops + self.expert_flops + self.attention(tokens)

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
    return Work(
        name=architecture.name,
        layers=architecture.num_layers,
        hidden=architecture.hidden_size,
        vocabulary=architecture.vocab_size,
        parameters=float(architecture.census.total),
        routed_parameters=routed,
        linear_flops=sums["linear"],
        attention_slope=slope,
        attention_flops=sums["attention"] + sums["scan"],
        expert_flops=sums["experts"],
        moe_layers=moe_layers,
        experts=int(experts.get("experts", 0)) or role.experts,
        top_k=int(experts.get("top_k", 0)) or role.top_k,
        expert_width=int(experts.get("intermediate", 0)) or role.width,
        expert_width_in=int(experts.get("hidden", 0)) or role.latent or 0,
        block_dense=max(sizes, default=0.0),
        block_routed=each,
    )


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
