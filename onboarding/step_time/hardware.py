"""What accelerators and their links can do at most, per device and direction. Published figures; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class System:
    """One kind of machine. Rates are dense peaks of the makers' data sheets."""

    key: str
    bf16: float
    """Matrix products, TFLOP/s."""
    fp8: float
    """With eight-bit operands, TFLOP/s; 0 where there are none."""
    fp4: float
    """With four-bit operands, TFLOP/s; 0 where there are none."""
    memory: float
    """TB/s."""
    link: float
    """Inside the domain that shares a fast fabric, GB/s each way."""
    domain: int
    """Devices in it."""
    nic: float
    """Between domains, GB/s each way."""

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products."""
        rate = {"bf16": self.bf16, "fp8": self.fp8, "mxfp8": self.fp8, "nvfp4": self.fp4}[precision]
        return (rate or self.bf16) * 1e12

    def crosses(self, group: int, *, per_node: int | None = None) -> float:
        """Share of an even exchange in a group of consecutive devices that leaves the domain."""
        inside = min(per_node or self.domain, group)
        return 1.0 - inside / group if group > 0 else 0.0


SYSTEMS = {
    system.key: system
    for system in (
        System(key="A100", bf16=312, fp8=0, fp4=0, memory=2.04, link=300, domain=8, nic=25),
        System(key="H100", bf16=989, fp8=1979, fp4=0, memory=3.35, link=450, domain=8, nic=50),
        System(key="H200", bf16=989, fp8=1979, fp4=0, memory=4.8, link=450, domain=8, nic=50),
        System(key="B200", bf16=2250, fp8=4500, fp4=9000, memory=8.0, link=900, domain=8, nic=50),
        System(key="B300", bf16=2250, fp8=4500, fp4=13500, memory=8.0, link=900, domain=8, nic=100),
        System(key="GB200", bf16=2500, fp8=5000, fp4=10000, memory=8.0, link=900, domain=72, nic=50),
        System(key="GB300", bf16=2500, fp8=5000, fp4=15000, memory=8.0, link=900, domain=72, nic=100),
        System(key="MI300X", bf16=1307, fp8=2615, fp4=0, memory=5.3, link=448, domain=8, nic=50),
    )
}
