"""How one model is spread over ranks. Free of torch: a plan file becomes this before anything is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Hierarchical = Literal["off", "across_first", "inside_first"]
Balance = Literal["none", "bias", "quantile"]
Overflow = Literal["drop", "reroute"]
Compression = Literal["none", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How tokens are kept evenly spread over experts. Modes add up: an auxiliary loss beside a bias is usual."""

    method: Balance = "none"
    """What moves the selection bias after each optimizer step: ``bias`` the loss-free rule
    b_e += speed sign(mean load - load_e); ``quantile`` sets b_e so that expert e would have got its k/E share."""
    bias_speed: float = 1e-3
    """Step of the loss-free rule."""
    quantile_bins: int = 1000
    """Bins of the histogram of (cutoff - score) over [-quantile_range, quantile_range]."""
    quantile_range: float = 1.0
    """Largest difference that is told apart; 1 suits scores that are probabilities."""
    aux_loss: float = 0.0
    """Coefficient of E sum_e f_e P_e, with the load f of the global batch; 0 adds none."""
    groups: int = 0
    """Experts are split into this many groups for group-limited routing; 0 leaves the model's own routing alone."""
    groups_kept: int = 0
    """A token's experts come from this many groups at most."""
    capacity_factor: float = 0.0
    """An expert takes at most ceil(factor x tokens x top_k / experts) of a rank's micro-batch; 0 is no limit."""
    overflow: Overflow = "drop"
    """What happens past the capacity: ``drop`` the slot, or ``reroute`` to the best expert with room. Both counted."""

    def __post_init__(self) -> None:
        _one_of("method", self.method, get_args(Balance))
        _one_of("overflow", self.overflow, get_args(Overflow))
        if self.bias_speed <= 0 or self.quantile_range <= 0 or self.quantile_bins < 2:
            raise ValueError("bias_speed and quantile_range must be positive, quantile_bins at least 2")
        if self.aux_loss < 0 or self.capacity_factor < 0:
            raise ValueError("aux_loss and capacity_factor cannot be negative; 0 switches them off")
        if (self.groups > 0) != (self.groups_kept > 0) or self.groups_kept > self.groups:
            raise ValueError("set groups and groups_kept together, with groups_kept at most groups; 0 and 0 for none")

    @property
    def active(self) -> bool:
        """Whether anything beyond counting is asked for."""
        return self.method != "none" or self.aux_loss > 0 or self.groups > 0 or self.capacity_factor > 0


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Layout of one run over its ranks."""

    ep: int = 1
    """Ranks that share one copy of the experts; each holds num_experts / ep of them."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP); the other ranks shard. 1 shards over all ranks."""
    hierarchical: Hierarchical = "off"
    """Two-hop all-to-all. ``across_first`` sends a token once to each *node* and spreads it there (least traffic
    between nodes); ``inside_first`` gathers a node's tokens on the rank that sends them on (largest messages)."""
    ranks_per_node: int = 0
    """Ranks of a node, needed for two hops; consecutive ranks share a node."""
    dispatch_chunks: int = 1
    """Token chunks whose all-to-all overlaps with the experts' work on the chunk before."""
    reshard_after_forward: bool = True
    """Free gathered weights after a block's forward and gather them again in backward."""
    compression: Compression = "none"
    """Format of gradients on the wire; anything but ``none`` keeps the rounding error and adds it next time."""
    deterministic: bool = False
    """Sum gradients in rank order in fp32 or wider: equal bits in every run, whatever the network does."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Load balance of the experts."""
    replicas: int = 0
    """Spare expert slots a rank, filled each step with copies of the busiest experts; 0 for none."""

    def __post_init__(self) -> None:
        _one_of("hierarchical", self.hierarchical, get_args(Hierarchical))
        _one_of("compression", self.compression, get_args(Compression))
        for name in ("ep", "dp_replicate", "dispatch_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.ranks_per_node < 0 or self.replicas < 0:
            raise ValueError("ranks_per_node and replicas cannot be negative")
        if self.hierarchical != "off":
            if self.ranks_per_node < 1:
                raise ValueError("hierarchical dispatch needs ranks_per_node: the number of ranks that share a node")
            if self.ep % self.ranks_per_node:
                raise ValueError(
                    f"hierarchical dispatch needs ep to be a multiple of ranks_per_node; {self.ep} is not one of "
                    f"{self.ranks_per_node}: use hierarchical off, or ep {self.ranks_per_node}"
                )

    def check(self, world_size: int, num_experts: int = 0) -> None:
        """Raise unless this layout fits.

        Args:
            world_size: ranks of the job.
            num_experts: routed experts of a layer; 0 for a dense model.

        Raises:
            ValueError: with the fix in the message.
        """
        if world_size % self.dp_replicate:
            raise ValueError(
                f"dp_replicate {self.dp_replicate} does not divide the {world_size} ranks; use one of "
                f"{_divisors(world_size)}"
            )
        shard = world_size // self.dp_replicate
        if shard % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {shard} ranks of a replica; use one of {_divisors(shard)}"
            )
        if self.ep > 1 and not num_experts:
            raise ValueError(f"ep {self.ep} on a model without routed experts; use ep 1")
        if num_experts and num_experts % self.ep:
            fitting = [n for n in _divisors(shard) if num_experts % n == 0]
            raise ValueError(f"ep {self.ep} does not divide {num_experts} experts; use one of {fitting}")
        if self.balance.groups and num_experts % self.balance.groups:
            raise ValueError(f"{self.balance.groups} groups do not divide {num_experts} experts")
        if self.replicas and self.ep == 1:
            raise ValueError("replicas spread the load of busy experts over expert ranks; with ep 1 use replicas 0")

    def efsdp(self, world_size: int) -> int:
        """Ranks over which one expert's weights are sharded."""
        return world_size // (self.dp_replicate * self.ep)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
