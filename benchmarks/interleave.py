"""``python -m benchmarks.interleave``: what interleaving two micro-batches could save at best, by the step-time model.

While one micro-batch computes the layers that depend on the sequence (attention, recurrences), another one's tokens
travel to their experts and back. That hides exchange which no computation hides yet; it creates nothing else, and it
holds the activations of a second micro-batch. The bound: all of the exposed exchange hidden, no cost for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from onboarding.devices import find_device
from onboarding.stages.parse.analyse import analyse
from onboarding.stages.scale import layout, memory, projection
from onboarding.stages.scale.result import Hardware
from onboarding.step_time.hardware import SYSTEMS
from onboarding.step_time.predict import predict
from onboarding.step_time.work import work_of

EXAMPLES = ("kimi-linear", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "deepseek-v3")
NODES = (1, 4, 16)
TOKENS = 8192
GIB = 1 << 30


def main() -> int:
    """Print a table; projections, not measurements."""
    print(f"{'model':<20}{'devices':>8}{'EP':>4}{'step s':>8}{'exchange':>10}{'at best':>9}{'second micro-batch':>20}")
    for name in EXAMPLES:
        for row in rows(name):
            print(
                f"{name:<20}{row['devices']:>8}{row['ep']:>4}{row['step_s']:>8.2f}{row['exchange']:>10.1%}"
                f"{row['gain']:>9.1%}{row['more_gib']:>15.1f} GiB"
            )
    return 0


def rows(name: str) -> list[dict[str, Any]]:
    """Adapters on H200s: the fastest layout that fits at some numbers of nodes."""
    config = json.loads((Path("examples") / name / "config.json").read_text())
    architecture = analyse(config, tokens=TOKENS).architecture
    work, device = work_of(architecture), find_device("h200")
    system = SYSTEMS[device.key.upper()]
    found = []
    for nodes in NODES:
        hardware = Hardware(
            name=device.name, nodes=nodes, per_node=8, memory_bytes=device.memory_gib * GIB, link=system.link,
            nic=system.nic,
        )  # fmt: skip
        best: dict[str, Any] = {}
        for ep in layout.possible(hardware, work):
            one = projection.setting(
                work, system, "adapters", devices=hardware.devices, per_node=8, ep=ep, microbatch=1,
                batch=4 * hardware.devices, tokens=TOKENS,
            )  # fmt: skip
            budget = memory.budget(architecture, work, hardware, "adapters", ep=ep, microbatch=1, tokens=TOKENS)
            step = predict([one])[0]
            if budget.fits and (not best or step.seconds < best["step_s"]):
                exchange = step.parts[projection.EXCHANGE]
                best = {
                    "devices": hardware.devices,
                    "ep": ep,
                    "step_s": step.seconds,
                    "exchange": exchange / step.seconds,
                    "gain": step.seconds / (step.seconds - exchange) - 1,
                    "more_gib": budget.device["activations"] / GIB,
                }
        if best:
            found.append(best)
    return found


if __name__ == "__main__":
    sys.exit(main())
