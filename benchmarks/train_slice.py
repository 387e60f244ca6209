"""``python -m benchmarks.train_slice BUNDLE --out FILE``: training steps of a slice, ours beside PEFT's, in one run.

The first layers of a published model at full width, random weights in bfloat16, LoRA on one GPU. Ours: the runtime's
own step (loss, clipping, AdamW) with the bundle, once for each way of keeping or recomputing activations. The peer:
transformers with grouped_mm experts, SDPA and whatever kernels of others it finds installed (fla), adapters by PEFT
with the very same values (our export, loaded by PEFT), the same clipping and optimizer. All contestants share the
base's weights and take turns; losses and gradient norms of the first steps stand beside the times.

Each one's memory is that of the base, its own adapters and optimizer, and what its step adds at the peak.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.run import commit, versions
from benchmarks.slice import build, load_apply
from runtime.config import DataConfig, MemoryConfig, ModelConfig, OptimizerConfig, RunConfig, StepConfig
from runtime.data.stream import Rows
from runtime.experts.replay import replay_contexts
from runtime.lora.adapter import apply_lora
from runtime.lora.config import LoraConfig
from runtime.lora.files import export_adapter
from runtime.memory import budget
from runtime.memory.contexts import joined
from runtime.memory.loss import install_loss
from runtime.memory.recompute import recompute_blocks
from runtime.memory.swap_cache import GIB, Counts, SwapCache
from runtime.model import blocks
from runtime.optimizer import make_optimizers
from runtime.packing import Boundaries
from runtime.parallel.config import ParallelConfig
from runtime.parallel.meshes import Meshes
from runtime.parallel.shard import parallelize
from runtime.step import Stepper

WARM = 3
"""Steps before the timed ones; the operator cache measures in the second and keeps from the third on."""
LR = 1e-4
TARGETS: dict[str, tuple[str, ...]] = {"all": ("attention", "gmm"), "attention": ("attention",)}
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Contestant:
    """One way to train the slice."""

    name: str
    step: Callable[[int, Tensor], tuple[float, float]]
    """Runs a step on [1, T + 1] ids; gives loss and gradient norm before clipping."""
    report: Callable[[], dict[str, Any]] = dict
    """What else there is to tell after the last step."""
    begin: Callable[[], None] = lambda: None
    """Called once, after the warm-up."""
    first: list[tuple[float, float]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    own_bytes: int = 0
    peak_bytes: int = 0
    first_s: float = 0.0


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every contestant was measured and all agree about the first step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_slice", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--definition", type=Path, default=Path("examples/kimi-linear"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ways", default="block,none,swap:0:24,swap:1:24,swap:2:24,swap:4:24,swap:24:0,merged")
    parser.add_argument("--targets", default="all,attention", help=", ".join(TARGETS))
    parser.add_argument("--peers", default="", help="none, or block (gradient checkpointing): any of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU: proves the path, not the speed")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; --tiny proves the path on the CPU")
    race = Race(options)
    for targets in filter(None, options.targets.split(",")):
        for way in filter(None, options.ways.split(",")):
            if way != "merged" or "gmm" in TARGETS[targets]:
                race.enter(f"ours {targets} {way}", partial(race.ours, way, TARGETS[targets]))
        for way in filter(None, options.peers.split(",")):
            race.enter(f"peft {targets} {way}", partial(race.peer, way, TARGETS[targets]))
    race.run()
    print(race.table())
    return race.status()


class Race:
    """The base's weights, the contestants that share them, and the record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu" if options.tiny else "cuda")
        self.adapters = Path(tempfile.mkdtemp())
        self.began = time.monotonic()
        if options.tiny:
            from kernel_templates import interpreter

            interpreter.activate()
        changes = {**TINY, "num_hidden_layers": 4} if options.tiny else {}
        self.base = build(options.definition, options.layers, 0, device=self.device, **changes)
        self.base.requires_grad_(False)
        vocabulary = int(self.base.config.vocab_size)  # type: ignore[union-attr, arg-type]
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(vocabulary, (8, 1, options.tokens + 1), generator=generator)
        self.batches = list(ids.to(self.device))
        self.base_bytes = self.allocated()
        self.contestants: list[Contestant] = []
        self.record: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu, interpreted",
            "commit": commit(),
            "versions": versions(),
            "measured": time.strftime("%Y-%m-%d"),
            "what": f"{options.definition.name}, {options.layers} layers, {options.tokens} tokens, LoRA rank "
            f"{options.rank}, whole training steps",
            "parameters": sum(p.numel() for p in self.base.parameters()),
            "weights_gib": self.base_bytes / GIB,
            "rows": {},
        }

    def enter(self, name: str, make: Callable[[], Contestant]) -> None:
        """Build a contestant and run its warm-up; what fails is recorded and takes no part."""
        gc.collect()
        before = self.allocated()
        try:
            contestant = make()
            contestant.name = name
            self._warm(contestant)
        except Exception as problem:
            self.record["rows"][name] = {"error": f"{type(problem).__name__}: {str(problem)[:500]}"}
        else:
            contestant.own_bytes = self.allocated() - before
            self.contestants.append(contestant)
            self._turn(contestant, WARM + 1)  # alone: a later peer's tuning may take all the time there is
            self.record["rows"][name] = {
                "first_steps": contestant.first,
                "first_s": contestant.first_s,
                "alone_ms": contestant.ms.pop(),
                "peak_gib": self._peak(contestant),
            }
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()
        print(
            f"{time.monotonic() - self.began:6.1f} s  {name}: {self.record['rows'][name]}", file=sys.stderr, flush=True
        )

    def _warm(self, contestant: Contestant) -> None:
        for number in range(1, WARM + 1):
            begun = time.perf_counter()
            contestant.first.append(contestant.step(number, self.batches[number - 1]))
            self.wait()
            contestant.first_s = contestant.first_s or time.perf_counter() - begun
        contestant.begin()
        gc.collect()

    def run(self) -> None:
        """Take turns; two steps a turn, the second is timed."""
        for turn in range(self.options.rounds):
            for contestant in self.contestants:
                self._turn(contestant, WARM + 1 + 2 * turn)
        for contestant in self.contestants:
            step_ms = statistics.median(contestant.ms)
            self.record["rows"][contestant.name] |= {
                "step_ms": step_ms,
                "all_ms": contestant.ms,
                "tokens_per_s": self.options.tokens / step_ms * 1e3,
                "peak_gib": self._peak(contestant),
                "own_gib": contestant.own_bytes / GIB,
                **contestant.report(),
            }
        self.save()  # whatever the profiler does
        for contestant in self.contestants:
            self.record["rows"][contestant.name]["kernels_ms"] = self._kernels_ms(contestant)
        self.record["seconds"] = time.monotonic() - self.began
        self.save()

    def _turn(self, contestant: Contestant, number: int) -> None:
        contestant.step(number, self.batches[number % len(self.batches)])
        self.wait()
        resting = self.allocated()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        contestant.step(number + 1, self.batches[(number + 1) % len(self.batches)])
        self.wait()
        contestant.ms.append((time.perf_counter() - begun) * 1e3)
        if self.device.type == "cuda":
            contestant.peak_bytes = max(contestant.peak_bytes, torch.cuda.max_memory_allocated() - resting)

    def _peak(self, contestant: Contestant) -> float:
        return (self.base_bytes + contestant.own_bytes + contestant.peak_bytes) / GIB

    def _kernels_ms(self, contestant: Contestant) -> float | None:
        """Time of all kernels of one step: what is far below the step's time says that the host is in the way."""
        if self.device.type != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            contestant.step(WARM + 2 * self.options.rounds + 1, self.batches[0])
            self.wait()
        return float(sum(event.self_device_time_total for event in profile.key_averages())) / 1e3

    # ---- contestants ------------------------------------------------------------------------------------------------

    def ours(self, way: str, targets: tuple[str, ...]) -> Contestant:
        """The runtime with the bundle.

        Args:
            way: block, none, merged (block, with merged experts), swap:DEVICE:HOST (GiB of the operator cache).
            targets: of the adapters.
        """
        lora = LoraConfig(r=self.options.rank, targets=targets, experts="merged" if way == "merged" else "grouped")
        kind, *sizes = way.split(":")
        memory = MemoryConfig(recompute="none" if kind == "none" else "block")
        if kind == "swap":
            memory = MemoryConfig(
                recompute="swap_cache", cache_device_gib=float(sizes[0]), cache_host_gib=float(sizes[1])
            )
        step = StepConfig(batch=1, microbatch=1)
        model = self.copy()
        apply_lora(model, lora)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith("_B"):  # not zero, so that every gradient takes part
                torch.nn.init.normal_(
                    parameter, std=1e-3, generator=torch.Generator(self.device).manual_seed(len(name))
                )
        folder = self.adapters / "-".join(targets)
        if not folder.exists():
            export_adapter(model, folder)
        cache = None
        if kind == "swap":
            cache = SwapCache(int(memory.cache_device_gib * GIB), int(memory.cache_host_gib * GIB), self.device)
        if kind != "none":
            recompute_blocks(model, joined(replay_contexts, cache.contexts) if cache else replay_contexts)
        if cache is not None:
            cache.watch([block for _, block in blocks(model)])
        install_loss(model, memory.loss_chunk)
        meshes = Meshes.alone(self.device.type)
        parallelize(model, meshes, ParallelConfig())
        # made here and timed here: no signature of somebody to check
        applied = load_apply(self.options.bundle)(model, bundle=self.options.bundle, verify=False, allow_unproven=True)
        optimizer = OptimizerConfig(lr=LR, schedule="constant")
        stepper = Stepper(
            model=model,
            optimizers=make_optimizers(model, optimizer, offload=False),
            meshes=meshes,
            config=step,
            device=self.device,
            boundaries=Boundaries(),
            cache=cache,
        )
        data = DataConfig(files=("-",), sequence_length=self.options.tokens)
        config = RunConfig(
            output=".", steps=1, model=ModelConfig(definition="."), data=data, lora=lora, step=step, memory=memory
        )
        planned = budget.plan(model, config, self.device, Path(), 1)

        def run(number: int, ids: Tensor) -> tuple[float, float]:
            result = stepper.run(number, [_rows(ids)])
            return result.loss, result.grad_norm

        def begin() -> None:
            if cache is not None:
                cache.counts, cache.peak = Counts(), dict(cache.used)

        def report() -> dict[str, Any]:
            told: dict[str, Any] = {
                "planned_gib": {name: n / GIB for name, n in planned.device.items()},
                "swapped": {digest[:8]: len(names) for digest, names in applied.swapped.items()},
                "ran": {digest[:8]: count for digest, count in applied.ran().items()},
                "skipped": applied.skipped,
                "fallbacks": applied.fallbacks,
            }
            if cache is not None:
                told["cache"] = cache.counts.table()
                told["cache_peak_gib"] = {tier: n / GIB for tier, n in cache.peak.items()}
            return told

        return Contestant(name="", step=run, begin=begin, report=report)

    def peer(self, way: str, targets: tuple[str, ...]) -> Contestant:
        """PEFT's adapters in transformers' model.

        Args:
            way: none, or block for gradient checkpointing.
            targets: of the adapters, in the runtime's words.
        """
        from peft import PeftModel

        folder = self.adapters / "-".join(targets)
        if not folder.exists():
            model = self.copy()
            apply_lora(model, LoraConfig(r=self.options.rank, targets=targets))
            export_adapter(model, folder)
        base: Any = self.copy()
        with warnings.catch_warnings():
            # peft asks transformers for attributes that transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
        if way == "block":
            base.activation_checkpointing_enable({"use_reentrant": False})
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

        def run(number: int, ids: Tensor) -> tuple[float, float]:
            loss = model(input_ids=ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:], use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(loss.detach()), float(norm)

        return Contestant(name="", step=run, report=lambda: {"trained": sum(p.numel() for p in trained)})

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def copy(self) -> nn.Module:
        """The model once more, on the very same weights."""
        shared = {id(t): t for t in [*self.base.parameters(), *self.base.buffers()]}
        return copy.deepcopy(self.base, shared)

    def allocated(self) -> int:
        """Bytes of the device's allocator; 0 on a CPU."""
        return int(torch.cuda.memory_allocated()) if self.device.type == "cuda" else 0

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def save(self) -> None:
        """What is known so far."""
        self.options.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def status(self) -> int:
        """0 if nobody failed and all agree about the first loss and gradient norm within 3 %."""
        rows = self.record["rows"]
        if any("error" in row for row in rows.values()):
            return 1
        for targets in TARGETS:
            starts = [row["first_steps"][0] for name, row in rows.items() if f" {targets} " in name]
            for values in zip(*starts, strict=True):
                if max(values) > 1.03 * min(values):
                    print(f"they disagree about the first step ({targets}): {values}", file=sys.stderr)
                    return 1
        return 0

    def table(self) -> str:
        """One line a contestant."""
        head = f"{'contestant':<26}{'ms':>8}{'tokens/s':>10}{'kernels':>9}{'GiB':>7}{'plan':>7}"
        lines = [f"{head}  loss and norm of the first step"]
        for name, row in self.record["rows"].items():
            if "step_ms" not in row:
                lines.append(f"{name:<26} {row.get('error', 'not timed')}")
                continue
            planned = sum(row["planned_gib"].values()) if "planned_gib" in row else 0.0
            loss, norm = row["first_steps"][0]
            figures = f"{row['step_ms']:8.1f}{row['tokens_per_s']:10,.0f}{row.get('kernels_ms') or 0:9.1f}"
            lines.append(f"{name:<26}{figures}{row['peak_gib']:7.2f}{planned:7.2f}  {loss:.4f} {norm:.4f}")
        return "\n".join(lines)


def _rows(ids: Tensor) -> Rows:
    """[1, T + 1] as one document that is trained whole."""
    length = ids.shape[1] - 1
    return Rows(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        positions=torch.arange(length, device=ids.device)[None],
        mask=torch.ones(1, length, dtype=torch.bool, device=ids.device),
        lengths=((length,),),
    )


if __name__ == "__main__":
    sys.exit(main())
