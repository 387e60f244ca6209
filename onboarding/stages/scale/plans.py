"""One way of training on the job's nodes: every layout with its memory and projected step, and the best one."""

from __future__ import annotations

from dataclasses import dataclass

from onboarding.architecture import Architecture
from onboarding.devices import Device
from onboarding.stages.scale import layout, limits, memory, projection
from onboarding.stages.scale.result import Budget, Hardware, Layout, Mode, ModePlan, ScalingPoint
from onboarding.step_time.hardware import System
from onboarding.step_time.predict import Prediction
from onboarding.step_time.terms import Setting
from onboarding.step_time.work import Work

WORDS: dict[Mode, str] = {
    "adapters": f"rank-{memory.RANK} adapters on the blocks' linear layers and routed experts, frozen bfloat16 base",
    "full": "all parameters, AdamW, float32 weights gathered in bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Planner:
    """What is the same for every way of training."""

    architecture: Architecture
    work: Work
    device: Device
    system: System
    hardware: Hardware
    """That the plan is for."""
    asked: Hardware
    """The job's; the curve goes as far, with what is of no use standing idle."""
    tokens: int
    """Of one sequence."""
    microbatch: int
    trial: tuple[float, str]

    def plan(self, mode: Mode) -> ModePlan:
        """The best layout that fits; where none does, the smallest, without a projection."""
        rows, budgets, settings, predictions = self.layouts(mode, self.hardware)
        fitting = [index for index, row in enumerate(rows) if row.fits]
        if fitting:
            best = min(fitting, key=lambda index: predictions[index].seconds)
        else:
            best = min(range(len(rows)), key=lambda index: rows[index].device_bytes)
        rows[best].chosen = True
        made = ModePlan(
            mode=mode,
            words=WORDS[mode],
            budget=budgets[best],
            layouts=rows,
            groups=layout.groups(self.hardware, rows[best].ep),
            expert_split=layout.expert_split(rows[best].ep, self.work),
            projection=None,
        )
        if not fitting:
            return made.model_copy(update={"reason": "no layout fits the devices' memory; more nodes would help"})
        found = projection.project(settings[best], predictions[best], self.curve(mode), self.device, trial=self.trial)
        return made.model_copy(update={"projection": found})

    def layouts(
        self, mode: Mode, hardware: Hardware
    ) -> tuple[list[Layout], list[Budget], list[Setting], list[Prediction]]:
        """Every layout of some hardware, side by side."""
        rows, budgets, settings = [], [], []
        for ep in layout.possible(hardware, self.work):
            found = memory.budget(
                self.architecture,
                self.work,
                hardware,
                mode,
                ep=ep,
                microbatch=self.microbatch,
                tokens=self.tokens,
            )
            budgets.append(found)
            rows.append(
                Layout(
                    ep=ep,
                    efsdp=hardware.devices // ep,
                    experts_per_rank=self.work.experts // ep if self.work.experts else 0,
                    hierarchical=layout.hierarchical(hardware, ep),
                    device_bytes=found.device_total,
                    fits=found.fits,
                )
            )
            settings.append(
                projection.setting(
                    self.work,
                    self.system,
                    mode,
                    devices=hardware.devices,
                    per_node=hardware.per_node,
                    ep=ep,
                    microbatch=self.microbatch,
                    batch=self.microbatch
                    * hardware.devices
                    * limits.accumulated(hardware.devices, self.microbatch, self.tokens),
                    tokens=self.tokens,
                )
            )
        return rows, budgets, settings, projection.fill(rows, settings, self.trial[0])

    def curve(self, mode: Mode) -> list[ScalingPoint]:
        """From one node to all of them, doubling, each with its own best layout."""
        points: list[projection.Point] = []
        last, nodes = self.asked.nodes, 1
        while nodes <= last:
            part = self.asked.model_copy(update={"nodes": nodes})
            used = limits.limited(part, self.microbatch, self.tokens)
            rows, _, settings, predictions = self.layouts(mode, used)
            usable = [i for i, row in enumerate(rows) if row.fits] or list(range(len(rows)))
            best = min(usable, key=lambda index: predictions[index].seconds / settings[index].tokens)
            points.append(
                projection.Point(
                    devices=part.devices,
                    usable=used.devices,
                    layout=rows[best],
                    setting=settings[best],
                    prediction=predictions[best],
                )
            )
            nodes = nodes * 2 if nodes * 2 <= last or nodes == last else last
        return projection.scaling(points)
