"""What one device has to do in one step, each term in seconds at the hardware's published rates. Free of torch.

Nothing here is fitted: FLOPs over peaks, bytes over bandwidths, counts of launches. Every term is of one device and one
optimizer step, with routing as even as ``imbalance`` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from onboarding.step_time.hardware import Precision, System
from onboarding.step_time.work import Work

BYTES = 2
"""Of one activation, weight or gradient on the wire."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model in one layout on one system."""

    work: Work
    system: System
    precision: Precision
    gpus: int
    gbs: int
    """Sequences of one step."""
    mbs: int
    """Sequences that a pipeline works on at a time."""
    seq: int
    fsdp: int = 0
    """Ranks that weights are sharded over and gathered from, block by block; 0: weights stay whole."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    """Model chunks a pipeline rank holds."""
    ep: int = 1
    adapters: bool = False
    """Weights are frozen: no products for their gradients, no reduction of them."""
    recompute: bool = False
    """Every block runs forward once more in backward."""
    imbalance: float = 1.0
    """Load of the busiest expert rank over the mean: it is the one that all wait for."""
    per_node: int | None = None
    """Devices of a fast domain; None takes the system's own."""

    @property
    def domain(self) -> int:
        """Devices of a fast domain."""
        return min(self.per_node or self.system.domain, self.gpus)

    @property
    def microbatches(self) -> float:
        """Of one step and pipeline."""
        return self.gbs * self.tp * self.pp * self.cp / (self.mbs * self.gpus)

    @property
    def tokens(self) -> float:
        """Of one step, for each device."""
        return self.gbs * self.seq / self.gpus

    @property
    def rows_per_expert(self) -> float:
        """Tokens that one expert gets from one micro-batch of its group."""
        work = self.work
        if not work.experts:
            return 0.0
        mine = self.mbs * self.seq / (self.tp * self.cp)
        return mine * self.ep * work.top_k / work.experts


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds at published rates, unless a name says otherwise."""

    linear: float
    attention: float
    scans: float
    experts: float
    vector: float
    """Every number that a product or a norm writes, written once and read once."""
    routed_vector: float
    """The same of the rows that go to experts."""
    logits: float
    """One write of the logits."""
    exchange_inside: float
    """All-to-all, inside domains."""
    exchange_between: float
    """All-to-all, between domains, a token counted once for each domain that it goes to."""
    tensor: float
    """Gathers and scatters of tensor parallelism."""
    context: float
    """Keys and values of context parallelism."""
    weights_inside: float
    """Gathers of weights and sums of gradients, inside domains."""
    weights_between: float
    launches: float
    """Layers that this device starts, micro-batch by micro-batch. A count."""
    routed_launches: float
    """Those with routed experts. A count."""
    bubble: float
    """Idle share of a pipeline with interleaved chunks, of the time it works."""
    optimizer: float


def terms(s: Setting) -> Terms:
    """All terms of a setting."""
    work, system = s.work, s.system
    peak, memory, link, nic = s.system.peak(s.precision), system.memory * 1e12, system.link * 1e9, system.nic * 1e9
    # forward, and in backward twice as much: gradients of inputs and of weights; frozen weights save the latter
    passes = (2.0 if s.adapters else 3.0) + (1.0 if s.recompute else 0.0)
    both = 3.5 + (1.0 if s.recompute else 0.0)
    hidden = s.tokens * work.layers * work.hidden * BYTES
    inside, between = _exchange(s)
    weights_inside, weights_between = _weights(s)
    return Terms(
        linear=passes * work.linear_flops * s.tokens / peak,
        attention=both * work.attention(s.seq) * s.tokens / s.system.peak("bf16"),
        scans=both * work.scan_flops * s.tokens / s.system.peak("bf16"),
        experts=passes * work.expert_flops * s.tokens * s.imbalance / peak,
        vector=2 * s.tokens * work.outputs * BYTES / memory,
        routed_vector=2 * s.tokens * work.routed_outputs * s.imbalance * BYTES / memory,
        logits=s.tokens * work.vocabulary * BYTES / memory,
        exchange_inside=inside * s.imbalance / link,
        exchange_between=between * s.imbalance / nic,
        tensor=8 * hidden * (s.tp - 1) / (link if s.tp <= s.domain else nic),
        context=4 * hidden * (s.cp - 1) / s.cp / (link if s.tp * s.cp <= s.domain else nic),
        weights_inside=weights_inside / link,
        weights_between=weights_between / nic,
        launches=work.layers / s.pp * s.microbatches,
        routed_launches=work.moe_layers / s.pp * s.microbatches,
        bubble=(s.pp - 1) / (s.vp * s.microbatches),
        optimizer=0.0 if s.adapters else 24 * work.parameters / s.gpus / memory,
    )


def _exchange(s: Setting) -> tuple[float, float]:
    """Bytes that one device sends for its tokens in a step: dispatch and combine, forward and backward."""
    if s.ep <= 1:
        return 0.0, 0.0
    work = s.work
    row = 4.0 * s.tokens * work.moe_layers * work.routed_width * BYTES
    domains = max(1.0, s.ep / s.domain)
    mine = min(s.ep, s.domain)
    # a token goes once to each rank that holds one of its experts, and between domains once to each domain
    inside = row * _reached(s.ep, work.top_k) * (1 - 1 / mine)
    between = row * _reached(domains, work.top_k) * (1 - 1 / domains)
    return inside, between


def _reached(places: float, choices: int) -> float:
    """How many of some places get at least one of a token's even choices, on average."""
    return places * (1 - (1 - 1 / places) ** choices)


def _weights(s: Setting) -> tuple[float, float]:
    """Bytes of weights gathered and gradients summed by one device in a step."""
    work = s.work
    dense = (work.parameters - work.routed_parameters) / (s.tp * s.pp)
    routed = work.routed_parameters / (s.ep * s.pp)
    inside = between = 0.0
    for mine, ranks in ((dense, s.gpus / (s.tp * s.pp)), (routed, s.gpus / (s.ep * s.pp))):
        if ranks <= 1 or mine <= 0:
            continue
        if s.fsdp > 1:
            # gathered for forward and for backward of every micro-batch; gradients of trained weights scattered once
            # a step's last one
            moved = mine * BYTES * (2.0 * s.microbatches + (0.0 if s.adapters else 1.0))
        else:
            moved = 0.0 if s.adapters else 2.0 * mine * BYTES
        spread = s.gpus > s.domain
        # ranks of one group that share a domain bring what comes from outside in once, each its share
        held = max(1.0, min(ranks, s.domain * ranks / s.gpus)) if spread else ranks
        inside += moved * (1 - 1 / held)
        if spread:
            between += moved / held * (1 - held / ranks)
    return inside, between
