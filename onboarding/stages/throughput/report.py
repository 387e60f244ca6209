"""What the confined child of the throughput stage reports: read as data that is not trusted. Free of torch."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Row(BaseModel):
    """A row of the child's breakdown."""

    label: str
    layers: int = 0
    forward_ms: float
    backward_ms: float
    parts: dict[str, float] = Field(default_factory=dict)


class Run(BaseModel):
    """What the child reports of one run; read as data that is not trusted."""

    bundle: bool
    times_ms: list[float]
    losses: list[float]
    median_ms: float = Field(gt=0)
    flops_per_token: float = Field(ge=0)
    peak_bytes: int
    kernels: int
    breakdown: list[Row]


class Length(BaseModel):
    """What the child reports of one length."""

    tokens: int = Field(gt=0)
    seconds: float
    bytes: int
    loss: float
    loss_error: float | None = None
    gradient_error: float | None = None


class Report(BaseModel):
    """Its whole report."""

    sizes: dict[str, int | str]
    layers: list[int]
    runs: list[Run] = Field(min_length=1)
    bundle_failure: str = ""
    """Why the run with the bundle is missing."""
    lengths: list[Length] = Field(default_factory=list)
    lengths_reason: str = ""
    """Why longer rows were not tried to the end."""
