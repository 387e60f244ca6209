"""What the scale stage stores."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onboarding.architecture import Record
from onboarding.context import StageResult

Mode = Literal["adapters", "full"]


class Hardware(Record):
    """The devices that were planned for."""

    name: str
    nodes: int
    per_node: int
    memory_bytes: int
    """Of one device."""
    link: float
    """Inside a node, GB/s each way and device."""
    nic: float
    """Between nodes, GB/s each way and device."""

    @property
    def devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node


class Group(Record):
    """Ranks that communicate with each other, and what for."""

    name: str
    purpose: str
    size: int
    count: int
    """Groups of this size; together they are all ranks."""
    stride: int
    """Between neighbours of one group."""
    first: list[int]
    """Ranks of the first group, sixteen at most."""
    between_nodes: float
    """Share of an even exchange in it that leaves the node."""


class Budget(Record):
    """Bytes of one rank by purpose, in three tiers; an estimate before anything is built."""

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    """Of the whole job: checkpoints are written once."""
    device_available: int

    @property
    def device_total(self) -> int:
        """All of the device tier."""
        return sum(self.device.values())

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return self.device_total <= self.device_available


class Layout(Record):
    """One way to spread the model over the ranks."""

    ep: int
    efsdp: int
    """Ranks over which one expert's weights are sharded."""
    experts_per_rank: int
    hierarchical: bool
    """Two-hop exchange: between nodes first, then inside."""
    device_bytes: int
    fits: bool
    step_s: float | None = None
    """Projected; None where it does not fit."""
    tokens_per_second_per_device: float | None = None
    all_to_all_share: float | None = None
    chosen: bool = False


class Part(Record):
    """One term of the projected step."""

    name: str
    seconds: float
    share: float


class ScalingPoint(Record):
    """The projection at one number of devices, same micro-batch a device."""

    devices: int
    ep: int
    step_s: float
    tokens_per_second_per_device: float
    efficiency: float
    """Of one node's tokens a second and device; idle devices count."""
    all_to_all_share: float
    fits: bool
    usable: int = 0
    """Devices that a step can keep busy; the others stand idle. 0 in results from before this was told."""


class UnevenPoint(Record):
    """The same step with a busier expert rank, which all others wait for."""

    imbalance: float
    """Load of the busiest rank over the mean."""
    step_s: float


class Projection(Record):
    """A step of the whole model on all devices. Projected, not measured."""

    step_s: float
    low_s: float
    """Lower end of the range that the error on published runs suggests."""
    high_s: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float
    all_to_all_share: float
    parts: list[Part]
    curve: list[ScalingPoint]
    uneven: list[UnevenPoint] = Field(default_factory=list)
    """What an uneven load of the experts would cost; empty for a dense model."""
    correction: float = 1.0
    """Measured over projected time of a trial run, applied to what runs on the device; 1 without one."""
    basis: list[str]
    """Where the figures come from, and the model's error on published runs that it was not fitted on."""


class ModePlan(Record):
    """Everything for one way of training."""

    mode: Mode
    words: str
    budget: Budget
    layouts: list[Layout]
    groups: list[Group]
    expert_split: str
    projection: Projection | None
    reason: str = ""
    """Why there is no projection."""


class CollectiveRow(Record):
    """Collectives of one rank in one step, from the dry run."""

    kind: str
    ranks: int
    phase: str
    calls: int
    bytes: int


class DryRank(Record):
    """What the dry run saw of one rank."""

    rank: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    tokens: int
    seconds: float
    host_bytes: int
    collectives: list[CollectiveRow]


class GlooRun(Record):
    """The reduced twin trained over real processes on this machine."""

    ranks: int
    ep: int
    step_ms: float
    tokens_per_second: float
    losses: list[float]
    difference: float
    """Largest relative difference of a step's loss from that of one process."""


class ScaleResult(StageResult):
    """Plans, dry run, real small runs, projection."""

    hardware: Hardware
    """What is planned for: the nodes that are of use."""
    asked_devices: int = 0
    """Of the job; more than those of ``hardware`` where the model cannot use all."""
    remarks: list[str] = Field(default_factory=list)
    """What the model does not gain from so many devices."""
    sequence_length: int
    microbatch: int
    """Sequences that one device runs at a time."""
    batch: int
    """Sequences of one step over all devices."""
    modes: list[ModePlan]
    dry_mode: Mode = "adapters"
    dry_ep: int = 1
    dry: list[DryRank] = Field(default_factory=list)
    dry_reason: str = ""
    """Why a rank is missing; empty if none is."""
    gloo: list[GlooRun] = Field(default_factory=list)
    gloo_reason: str = ""
    not_measured: list[str]
    seconds: float
