"""Times configurations of one candidate on a GPU. Confined like the judge's child; writes JSON lines to stdout.

What it reports chooses a configuration and nothing else: the judge proves the choice afterwards.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.launch import quicken
from kernel_templates.loading import load_module
from kernel_templates.novel import NovelSpec
from kernel_templates.registry import family_module, load_spec
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge import novel as _novel  # noqa: F401  (stands for the modules of novel operators)
from onboarding.stages.tune.compiling import compile_configs, shapes_of, start_pool

FLUSH_BYTES = 256 * 2**20
"""Several times the 50 MB of an H200's L2."""
FINALISTS = 4
FIRST_TURNS, LAST_TURNS = 3, 15

Tensors = dict[str, Tensor | None]
Config = dict[str, Any]
Compile = Callable[[list[Config]], list[bool]]


class Entry:
    """One configuration and its times in milliseconds."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.forward_ms: list[float] = []
        self.backward_ms: list[float] = []

    @property
    def total_ms(self) -> float:
        """Median forward plus median backward; infinite before any timing."""
        if not self.forward_ms:
            return float("inf")
        return statistics.median(self.forward_ms) + statistics.median(self.backward_ms)


class Bench:
    """A candidate on two sets of inputs of one shape, so that no call sees the values of the call before."""

    def __init__(self, module: ModuleType, spec: OperatorSpec, case: Case) -> None:
        cases = family_module(spec.family, "cases")
        generator = torch.Generator("cuda").manual_seed(0)
        dtype = getattr(torch, spec.dtype)
        self.module = module
        self.sets: list[Tensors] = [cases.make_tensors(spec, case, generator, dtype, "cuda") for _ in range(2)]
        self.needs = frozenset(
            role.name for role in spec.inputs() if role.differentiable and self.sets[0].get(role.name) is not None
        )
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.upstream: Tensors = {}
        self.turn = 0

    def once(self, entry: Entry) -> None:
        """One forward and one backward, each after a flush of the cache."""
        tensors = self.sets[self.turn % len(self.sets)]
        self.turn += 1
        forward_ms, (outputs, saved) = self._timed(partial(self.module.forward, tensors, entry.config))
        if not self.upstream:
            self.upstream = {n: torch.randn_like(t) if t.is_floating_point() else None for n, t in outputs.items()}
        grads = dict(self.upstream)
        backward = partial(self.module.backward, tensors, saved, grads, self.needs, entry.config)
        backward_ms, _ = self._timed(backward)
        entry.forward_ms.append(forward_ms)
        entry.backward_ms.append(backward_ms)

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)), result


def tune(
    bench: Bench, configs: list[Config], compiled: Compile, seconds: float, say: Callable[..., None]
) -> list[Entry]:
    """The best configurations by time, fastest first; empty where none runs.

    All are compiled first, side by side. Then successive halving: everybody is timed a few times in turns, the slower
    half leaves, and the others go on until few are left, which race each other. Families whose kernels are independent
    list a base and variations of one kernel each: the best variations are combined before the last race.

    Args:
        bench: inputs.
        configs: the space.
        compiled: compiles a list of configurations and says which of them can run.
        seconds: after them the field is halved without another round; compilation is not cut short.
        say: told of every configuration that was tried.
    """
    ends = time.monotonic() + seconds
    alive = [Entry(config) for config, ok in zip(configs, compiled(configs), strict=True) if ok]
    alive = [entry for entry in alive if _runs(bench, entry)]
    say(tried=len(configs) - len(alive))
    _round(bench, alive, FIRST_TURNS)
    extra = [Entry(c) for c in combine([e.config for e in alive], [e.total_ms for e in alive])]
    if extra and compiled([e.config for e in extra])[0] and _runs(bench, extra[0]):
        _round(bench, extra, FIRST_TURNS)
        alive += extra
    while len(alive) > FINALISTS:
        left = sorted(alive, key=lambda e: e.total_ms)[: max(FINALISTS, len(alive) // 2)]
        say(tried=len(alive) - len(left))
        alive = left
        if time.monotonic() < ends:
            _round(bench, alive, FIRST_TURNS)
    for entry in alive:
        entry.forward_ms, entry.backward_ms = [], []
    turns = 0
    while turns < FIRST_TURNS or (turns < LAST_TURNS and time.monotonic() < ends):
        _round(bench, alive, 1)
        turns += 1
    say(tried=len(alive))
    return sorted(alive, key=lambda e: e.total_ms)


def _round(bench: Bench, entries: list[Entry], turns: int) -> None:
    """Everybody in turns, so that a change of the clock hits all alike."""
    for _ in range(turns):
        for entry in entries:
            bench.once(entry)


def _runs(bench: Bench, entry: Entry) -> bool:
    """Whether the configuration runs at all; the time of this first call does not count."""
    try:
        bench.once(entry)
    except Exception as problem:
        torch.cuda.synchronize()
        print(f"{entry.config}: {problem}", file=sys.stderr)
        return False
    entry.forward_ms, entry.backward_ms = [], []
    return True


def combine(configs: list[Config], times: list[float]) -> list[Config]:
    """The first configuration with the best variation of every kernel's settings, if that is a new one."""
    if len(configs) < 3:
        return []
    base, base_ms = configs[0], times[0]
    best: dict[str, tuple[float, Config]] = {}
    for config, ms in zip(configs[1:], times[1:], strict=True):
        changed = {n: v for n, v in config.items() if base.get(n) != v}
        kernel = next(iter(changed)).split("_")[0] if changed else ""
        if {n.split("_")[0] for n in changed} == {kernel} and ms < min(base_ms, best.get(kernel, (base_ms, {}))[0]):
            best[kernel] = (ms, changed)
    merged = dict(base)
    for _, changed in best.values():
        merged.update(changed)
    return [merged] if len(best) > 1 and merged not in configs else []


def main() -> None:
    """``python -m onboarding.stages.tune.child JOB.json``."""
    with start_pool() as pool:
        _work(json.loads(Path(sys.argv[1]).read_text()), pool)


def _work(job: dict[str, Any], pool: Pool) -> None:
    spec = load_spec(job["spec"])
    source = Path(job["candidate"])
    module = load_module(source)
    quicken(module)
    major, minor = torch.cuda.get_device_capability()

    def say(**data: Any) -> None:
        print(json.dumps(data), flush=True)

    done: list[dict[str, int]] = []
    for number, case in enumerate(job["cases"]):
        try:
            bench = Bench(module, spec, Case(**case))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(f"{case['name']}: does not fit this GPU", file=sys.stderr)
            continue
        bucket = module.bucket(bench.sets[0])
        if bucket in done:  # its sizes do not depend on the number of tokens
            continue
        done.append(bucket)
        if isinstance(spec, NovelSpec):
            configs = list(module.CONFIGS)
        else:
            configs = family_module(spec.family, "tuning").space(spec, bucket)

        def compiled(some: list[Config], bench: Bench = bench) -> list[bool]:
            found = compile_configs(pool, source, shapes_of(bench.sets[0]), some, 10 * major + minor)
            for each in found:
                print("\n".join(each.errors), end="\n" * bool(each.errors), file=sys.stderr)
            return [not each.errors for each in found]

        began = time.monotonic()
        ranked = tune(bench, configs, compiled, job["seconds"], partial(say, case=number, total=len(configs)))
        if ranked:
            first = ranked[0]
            say(
                case=number,
                name=case["name"],
                bucket=bucket,
                config=first.config,
                forward_ms=statistics.median(first.forward_ms),
                backward_ms=statistics.median(first.backward_ms),
                tried=len(configs),
                seconds=round(time.monotonic() - began, 1),
            )
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
