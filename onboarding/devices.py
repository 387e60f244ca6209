"""Rooflines of the devices that gaps are ranked for. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onboarding.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one accelerator can do at most."""

    key: str
    name: str
    tflops: float
    """Dense bf16 matrix products, TFLOP/s."""
    bandwidth: float
    """Device memory, TB/s."""
    memory_gib: int
    basis: str
    """Where the two numbers come from."""
    peak_tflops: float
    """Published dense bf16 peak: what MFU is a share of."""

    def floor_ms(self, flops: float, bytes_moved: float) -> float:
        """The roofline: the longer of computing and moving, in milliseconds."""
        return 1e3 * max(flops / (self.tflops * 1e12), bytes_moved / (self.bandwidth * 1e12))

    def bound(self, flops: float, bytes_moved: float) -> Literal["compute", "memory"]:
        """Which of the two is the longer."""
        return "compute" if flops / self.tflops >= bytes_moved / self.bandwidth else "memory"


_PEAK = "published peak; real kernels reach 70 to 85 % of it"
DEVICES = {
    device.key: device
    for device in (
        Device(
            key="h200",
            name="NVIDIA H200 SXM",
            tflops=685.0,
            bandwidth=4.27,
            memory_gib=141,
            basis="measured: 8192^3 bf16 matrix product and a device copy, torch 2.11",
            peak_tflops=989.0,
        ),
        Device(
            key="h100",
            name="NVIDIA H100 SXM",
            tflops=989.0,
            bandwidth=3.35,
            memory_gib=80,
            basis=_PEAK,
            peak_tflops=989.0,
        ),
        Device(
            key="b200",
            name="NVIDIA B200",
            tflops=2250.0,
            bandwidth=8.0,
            memory_gib=192,
            basis=_PEAK,
            peak_tflops=2250.0,
        ),
        Device(
            key="a100",
            name="NVIDIA A100 SXM 80 GB",
            tflops=312.0,
            bandwidth=2.039,
            memory_gib=80,
            basis=_PEAK,
            peak_tflops=312.0,
        ),
        Device(
            key="mi300x",
            name="AMD MI300X",
            tflops=1307.0,
            bandwidth=5.3,
            memory_gib=192,
            basis=_PEAK,
            peak_tflops=1307.0,
        ),
    )
}


def find_device(key: str) -> Device:
    """The roofline of a device by its key, case and spaces ignored.

    Raises:
        Problem: ``unknown-target``.
    """
    device = DEVICES.get(key.lower().replace(" ", "").replace("-", ""))
    if device is None:
        raise Problem(
            "unknown-target", f"no roofline for device {key!r}", f"known: {', '.join(DEVICES)}", field="target"
        )
    return device
