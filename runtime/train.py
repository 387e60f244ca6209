"""Run a training run: ``torchrun -m runtime.train CONFIG`` on many ranks, ``python -m runtime.train CONFIG`` on one.

CONFIG is a YAML file, or ``package.module:function`` that returns a RunConfig. Started again, a run goes on from its
last whole checkpoint. Exit status: 0 finished, or saved after SIGTERM or SIGINT; 1 refused or stopped by an alert;
75 a rank that hung ended itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint import folder, reader
from runtime.checkpoint.state import State, collect, create_optimizer_state
from runtime.checkpoint.writer import Writer
from runtime.config import RunConfig, dump, load
from runtime.data.stream import Place, Prefetcher, Stream
from runtime.export import export
from runtime.guard.signals import StopWish
from runtime.guard.watchdog import Watchdog
from runtime.memory import budget
from runtime.optimizer import make_optimizers, rate, set_rate
from runtime.refusal import Refused
from runtime.setup import Checked, Ready, World, assemble, check, start
from runtime.step import Health, Stepper, StepResult, be_deterministic
from runtime.telemetry.collect import Telemetry
from runtime.telemetry.communication import profiled
from runtime.voice import Voice

MEMORY_SLACK = 1.25
"""Measured over planned device memory above which the run says that the plan was wrong."""


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="runtime.train", description=__doc__)
    parser.add_argument("config", help="YAML file, or package.module:function")
    parser.add_argument("--events", action="store_true", help="say everything as JSON lines")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; touch no device")
    options = parser.parse_args(arguments)
    voice = Voice(first=os.environ.get("RANK", "0") == "0", events=options.events)
    try:
        return run(load(options.config), voice, dry_run=options.dry_run)
    except Refused as refused:
        voice.say("problem", **refused.to_dict())
        if not voice.first:  # what one rank alone met (a record of its share) must not be lost
            print(f"rank {os.environ['RANK']}: {refused}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(config: RunConfig, voice: Voice, *, dry_run: bool = False) -> int:
    """Train; gives the exit status.

    Raises:
        Refused: the run is not possible, or must not go on.
    """
    world = World.from_environment(config.device)
    if config.step.deterministic:
        be_deterministic()
    checked = check(config, world)
    output = Path(config.output)
    saved = folder.steps(output / "checkpoints")
    if saved:
        reader.check(folder.path_of(output / "checkpoints", saved[-1]), checked.identity)
    _introduce(checked, world, voice)
    if dry_run:
        plan = budget.plan(checked.model, config, torch.device("cpu"), output, world.size)
        voice.say("budget", lines=plan.lines(), **plan.to_plain())
        return 0
    device = start(world)
    if world.rank == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "run.yaml").write_text(dump(config))
    guard = config.guard
    beats = output / "heartbeats"
    with (
        StopWish() as wish,
        Watchdog(beats, world.rank, hang_s=guard.hang_s, heartbeat_s=guard.heartbeat_s) as dog,
    ):
        ready = assemble(checked, world, device, alive=lambda: dog.progress(0, "loading"))
        return Run(checked, ready, world, device, voice, wish, dog).go()


def _introduce(checked: Checked, world: World, voice: Voice) -> None:
    parameters = sum(p.numel() for p in checked.model.parameters())
    trained = sum(p.numel() for p in checked.model.parameters() if p.requires_grad)
    voice.say(
        "checked",
        parameters=f"{parameters:,}",
        trained=f"{trained:,}",
        records=len(checked.source),
        ranks=world.size,
        device=world.device,
        flops_per_token=checked.flops.training,
        unused_weights=len(checked.load.unused),
    )


class Run:
    """The loop over steps of one rank."""

    def __init__(
        self,
        checked: Checked,
        ready: Ready,
        world: World,
        device: torch.device,
        voice: Voice,
        wish: StopWish,
        dog: Watchdog,
    ) -> None:
        config = self.config = checked.config
        self.checked, self.ready, self.world, self.voice, self.wish, self.dog = checked, ready, world, voice, wish, dog
        self.output = Path(config.output)
        self.optimizers = make_optimizers(ready.model, config.optimizer, offload=config.memory.offload_optimizer)
        self.budget = budget.plan(ready.model, config, device, self.output, world.size)
        voice.say("budget", lines=self.budget.lines(), **self.budget.to_plain())
        budget.refuse_too_large(self.budget)
        create_optimizer_state(self.optimizers)
        self.state: State = collect(ready.model, self.optimizers)
        self.stepper = Stepper(
            model=ready.model,
            optimizers=self.optimizers,
            meshes=ready.meshes,
            config=config.step,
            device=device,
            boundaries=ready.boundaries,
            cache=ready.cache,
            seed=config.model.seed,
        )
        self.writer = Writer(self.output / "checkpoints", config.checkpoint, voice.report)
        first = world.rank == 0
        self.telemetry = Telemetry(config, self.output, device, world.size, checked.flops, first=first)
        self.device = device
        self.losses: dict[str, float] = {}
        self.step = 0
        self.alerted = ""

    def go(self) -> int:
        """Resume, train, save, export; gives the exit status."""
        begun = time.monotonic()
        self._say_what_runs()
        with ExitStack() as ended:
            ended.callback(self.telemetry.close)
            ended.callback(self.writer.wait)
            data = self._data(self._resume())
            ended.callback(data.close)
            stopped = self._steps(data)
        if stopped and self.writer.failed is not None:
            detail = f"{self.writer.failed}; started again, the run goes on from the checkpoint before"
            raise Refused(
                "not-saved", f"stopped after step {self.step} by {stopped}, and it could not be saved", detail
            )
        if stopped:
            self.voice.say("stopped", step=self.step, why=stopped)
            return 1 if self.alerted else 0
        self.dog.progress(self.step, "exporting")
        path = export(self.ready.model, self.config, self.output)
        self.voice.say(
            "result",
            steps=self.step,
            first=self.losses.get("first", float("nan")),
            last=self.losses.get("last", float("nan")),
            seconds=time.monotonic() - begun,
            path=str(path),
        )
        return 0

    def _data(self, places: list[Place] | None) -> Prefetcher:
        """This rank's lanes, from their places on."""
        config = self.config
        share = config.step.batch // self.world.size
        stream = Stream(
            self.checked.source,
            self.checked.encoder,
            config.data,
            lanes=config.step.batch,
            mine=range(self.world.rank * share, (self.world.rank + 1) * share),
            microbatch=config.step.microbatch,
            places=places,
        )
        return Prefetcher(stream)

    def _steps(self, data: Prefetcher) -> str:
        """All steps that are left; gives why it stopped early, empty where it did not."""
        config = self.config
        for step in range(self.step + 1, config.steps + 1):
            self.telemetry.begin()
            value = rate(config.optimizer, step, config.steps)
            set_rate(self.optimizers, value)
            result = self._step(step, data)
            self.step = step
            self.dog.progress(step, "training")
            self._tell(step, result, value)
            why = (self.wish.wished or "a signal to another rank") if result.stop else self.alerted
            due = config.checkpoint.every and step % config.checkpoint.every == 0
            if why or due or step == config.steps:
                self._save(data.places(), wait=bool(why) or step == config.steps)
            if why:
                return why
        return ""

    def _step(self, step: int, data: Prefetcher) -> StepResult:
        rows, wish = data.step(), self.wish.wished is not None
        if step != self.config.telemetry.profile_step:
            return self.stepper.run(step, rows, wish=wish)
        result, times = profiled(lambda: self.stepper.run(step, rows, wish=wish), self.device)
        words = ", ".join(f"{name.replace('_', ' ')} {value * 1e3:.1f} ms" for name, value in times.items())
        self.voice.say("profile", step=step, words=words, **times)
        return result

    def _tell(self, step: int, result: StepResult, value: float) -> None:
        record, alerts = self.telemetry.record(step, result, value, self.ready.model, self.ready.cache)
        self.losses.setdefault("first", result.loss)
        self.losses["last"] = result.loss
        experts = {k: v for k, v in record.get("experts", {}).items() if k != "load"}
        self.voice.say("step", **{**record, **({"experts": experts} if experts else {})}, steps=self.config.steps)
        if result.skipped:
            self.voice.say("skipped", step=step, why=result.skipped)
        for alert in alerts:
            self.voice.say("alert", **asdict(alert))
            if alert.stop:
                self.alerted = f"an alert ({alert.words})"
        if "checked" not in self.losses:
            self.losses["checked"] = 1.0
            self._compare(record)

    def _compare(self, record: dict[str, Any]) -> None:
        """After the first step: what was planned beside what is."""
        planned = self.budget.total("device")
        found = record["device_bytes"]
        what = "device memory" if self.device.type == "cuda" else "process memory (with Python and torch in it)"
        words = f"{found / (1 << 20):.0f} MiB of {what} at the peak, {planned / (1 << 20):.0f} MiB planned"
        if self.device.type == "cuda" and found > MEMORY_SLACK * planned:
            words += ": more than planned; a longer run may not fit"
        self.voice.say("memory", words=words, measured=found, planned=planned)

    def _say_what_runs(self) -> None:
        applied = self.ready.applied
        if applied is not None:
            swapped = sum(len(modules) for modules in applied.swapped.values())
            notes = f", {len(applied.skipped)} keep their own code" if applied.skipped else ""
            self.voice.say("kernels", swapped=swapped, notes=notes, skipped=applied.skipped)
        if self.ready.isolated:
            self.voice.say("isolated", classes=", ".join(self.ready.isolated))

    def _resume(self) -> list[Place] | None:
        """Fill the run from the newest whole checkpoint; gives the lanes' places."""
        found = reader.find(self.writer.root, self.config.checkpoint, self.voice.report)
        if found is None:
            return None
        reader.check(found, self.checked.identity)
        reader.load(found, self.state)
        saved = reader.read_run(found)
        self.step = int(saved["step"])
        self.stepper.health = Health(**saved["health"])
        self.losses.update(saved["losses"])
        self.voice.say("resumed", step=self.step, path=str(found))
        return [(int(document), int(offset)) for document, offset in saved["places"]]

    def _save(self, places: list[Place], *, wait: bool) -> None:
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, places)
        losses = {k: v for k, v in self.losses.items() if k != "checked"}
        about = {
            "step": self.step,
            "places": [place for part in gathered for place in part],
            "health": asdict(self.stepper.health),
            "losses": losses,
            "identity": self.checked.identity,
            "world_size": self.world.size,
        }
        self.dog.progress(self.step, "saving")
        self.writer.save(self.step, self.state, about, wait=wait)


if __name__ == "__main__":
    sys.exit(main())
