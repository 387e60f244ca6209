"""Times configurations of one candidate on a GPU. Confined like the judge's child; writes JSON lines to stdout.

What it reports chooses a configuration and nothing else: the judge proves the choice afterwards.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.loading import load_module
from kernel_templates.novel import NovelSpec
from kernel_templates.registry import family_module, load_spec
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge import novel as _novel  # noqa: F401  (stands for the modules of novel operators)

FLUSH_BYTES = 256 * 2**20
"""Several times the 50 MB of an H200's L2."""
FINALISTS = 8
ROUNDS = 15
COMPILERS = 8

Tensors = dict[str, Tensor | None]
Config = dict[str, Any]


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
        self.turn = 0

    def once(self, entry: Entry) -> None:
        """One forward and one backward, each after a flush of the cache."""
        tensors = self.sets[self.turn % len(self.sets)]
        self.turn += 1
        forward_ms, (outputs, saved) = self._timed(partial(self.module.forward, tensors, entry.config))
        grads = {n: torch.ones_like(t) for n, t in outputs.items()}
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


def tune(bench: Bench, configs: list[Config], say: Callable[..., None]) -> list[Entry]:
    """Compile all, drop those that fail, time the rest, combine the winners, and race the best in turns."""
    entries = [Entry(config) for config in configs]
    with ThreadPoolExecutor(COMPILERS) as pool:  # LLVM and ptxas work outside the interpreter's lock
        alive = [e for e, ok in zip(entries, pool.map(partial(_compiles, bench), entries), strict=True) if ok]
    for entry in alive:
        for _ in range(3):
            bench.once(entry)
        say(tried=1)
    combined = combine([e.config for e in alive], [e.total_ms for e in alive])
    if combined is not None and combined not in [e.config for e in alive]:
        extra = Entry(combined)
        if _compiles(bench, extra):
            bench.once(extra)
            alive.append(extra)
    best = sorted(alive, key=lambda e: e.total_ms)[:FINALISTS]
    for entry in best:
        entry.forward_ms, entry.backward_ms = [], []
    for _ in range(ROUNDS):
        for entry in best:
            bench.once(entry)
    return sorted(best, key=lambda e: e.total_ms)


def _compiles(bench: Bench, entry: Entry) -> bool:
    """Whether the configuration runs at all (it may exceed shared memory)."""
    try:
        bench.once(entry)
    except Exception as problem:
        torch.cuda.synchronize()
        print(f"{entry.config}: {problem}", file=sys.stderr)
        return False
    entry.forward_ms, entry.backward_ms = [], []
    return True


def combine(configs: list[Config], times: list[float]) -> Config | None:
    """The first configuration with the best variation of every group of settings that varies with it.

    Families whose kernels are independent list a base and variations of one kernel each.
    """
    if len(configs) < 3:
        return None
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
    return merged if len(best) > 1 else None


def main() -> None:
    """``python -m onboarding.stages.tune.child JOB.json``."""
    job = json.loads(Path(sys.argv[1]).read_text())
    spec = load_spec(job["spec"])
    module = load_module(Path(job["candidate"]))

    def say(**data: Any) -> None:
        print(json.dumps(data), flush=True)

    for number, case in enumerate(job["cases"]):
        bench = Bench(module, spec, Case(**case))
        bucket = module.bucket(bench.sets[0])
        if isinstance(spec, NovelSpec):
            configs = list(module.CONFIGS)
        else:
            configs = family_module(spec.family, "tuning").space(spec, bucket)
        ranked = tune(bench, configs, partial(say, case=number, total=len(configs)))
        if ranked:
            first = ranked[0]
            say(
                case=number,
                bucket=bucket,
                config=first.config,
                forward_ms=statistics.median(first.forward_ms),
                backward_ms=statistics.median(first.backward_ms),
                tried=len(configs),
            )
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
