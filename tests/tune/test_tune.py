"""Tuning: skipped without a GPU, and independent kernels' winners are combined."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.registry import VARIANTS
from kernel_templates.linear_cross_entropy.spec import Spec as Loss
from kernel_templates.registry import FAMILIES, family_module
from onboarding.problem import StageSkipped
from onboarding.stages.tune.child import Entry, combine, tune
from onboarding.stages.tune.stage import run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped_with_the_reason() -> None:
    context = SimpleNamespace(options=SimpleNamespace(device="auto"))
    with pytest.raises(StageSkipped, match="no GPU here"):
        run(context)  # type: ignore[arg-type]


def test_winners_of_independent_kernels_are_combined() -> None:
    base = {"scan_bv": 64, "scan_warps": 4, "gram_bk": 32}
    configs = [base, base | {"scan_bv": 32}, base | {"scan_bv": 16, "scan_warps": 8}, base | {"gram_bk": 64}]
    assert combine(configs, [10.0, 9.0, 8.0, 9.5]) == [{"scan_bv": 16, "scan_warps": 8, "gram_bk": 64}]
    # what is slower than the base is left out; a single winner is in the list already
    assert combine(configs, [10.0, 11.0, 12.0, 9.5]) == []
    assert combine(configs[:2], [1.0, 2.0]) == []


class Stopwatch:
    """A bench whose times are known: each configuration takes what it says, and ``broken`` ones do not run."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def once(self, entry: Entry) -> None:
        if entry.config.get("broken"):
            raise RuntimeError("out of shared memory")
        self.calls.append(entry.config["ms"])
        entry.forward_ms.append(entry.config["ms"])
        entry.backward_ms.append(0.0)


def test_the_slower_half_leaves_and_the_fastest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    space = [{"ms": ms} for ms in (9, 5, 7, 3, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40)]
    space += [{"ms": 1, "broken": True}, {"ms": 2, "wide": True}]
    bench: Any = Stopwatch()
    tried = 0

    def compiled(configs: list[dict[str, Any]]) -> list[bool]:
        return [not config.get("wide") for config in configs]

    def say(**data: Any) -> None:
        nonlocal tried
        tried += data["tried"]

    ranked = tune(bench, space, compiled, 60.0, say)
    assert [entry.config["ms"] for entry in ranked] == [3, 5, 7, 8]
    assert tried == len(space)  # everybody is accounted for once
    # slow ones are timed in the first round only (and run once before it)
    assert bench.calls.count(40) == 4
    assert bench.calls.count(3) > 15


def test_with_no_time_left_every_configuration_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench: Any = Stopwatch()
    ranked = tune(bench, [{"ms": ms} for ms in range(20, 0, -1)], lambda c: [True] * len(c), 0.0, lambda **_: None)
    assert ranked[0].config == {"ms": 1}


SAYING = sorted(family for family in FAMILIES if hasattr(family_module(family, "cases"), "training_case"))


@pytest.mark.parametrize("family", SAYING)
def test_every_family_says_what_a_training_step_hands_it(family: str) -> None:
    spec = next(s for s in VARIANTS.values() if s.family == family)
    sizes: dict[str, Any] = {n: min(v, 64) for n, v in spec.dims().items()}
    small = dataclasses.replace(spec, **sizes)
    cases = family_module(family, "cases")
    made = {
        count: cases.make_tensors(
            small, cases.training_case(small, count), torch.Generator().manual_seed(0), torch.bfloat16, "cpu"
        )
        for count in (24, 48)
    }
    needed = {role.name for role in small.inputs() if not role.optional}
    assert needed <= {name for name, tensor in made[24].items() if tensor is not None}
    twice = [n for n, t in made[24].items() if t is not None and made[48][n].numel() == 2 * t.numel()]
    assert twice, "no input grows with the tokens"


def test_configurations_compile_side_by_side_and_shared_kernels_once(tmp_path: Path) -> None:
    """In a process of its own: this one interprets."""
    program = """
import json, sys
from pathlib import Path
from benchmarks.candidate import source
from benchmarks.registry import VARIANTS
from kernel_templates.recording import record_launches
from onboarding.stages.tune import compiling
if __name__ == "__main__":
    path = Path(sys.argv[1]) / "kernel.py"
    path.write_text(source(VARIANTS["norm"]))
    shapes = {"x": ((64, 2304), "bfloat16"), "weight": ((2304,), "bfloat16")}
    table = json.loads(Path("kernel_templates/norm/configs/nvidia_h200.json").read_text())
    config = table["rows"][0]["config"]
    with compiling.start_pool() as pool:
        found = compiling.compile_configs(pool, path, shapes, [config, dict(config), {}], 90)
    print(json.dumps([[c.shared_bytes, len(c.errors)] for c in found]))
"""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, empty = json.loads(done.stdout.splitlines()[-1])
    assert first == second
    assert first[1] == 0
    assert empty[1] > 0  # a configuration without its settings is an error of its own, and stops nobody
    assert {p.stem for p in (tmp_path / "cache").rglob("*.cubin")} == {
        "_forward_kernel",
        "_backward_kernel",
        "_totals_kernel",
    }


def test_sums_of_many_blocks_in_the_weights_dtype_are_neither_shipped_nor_tried() -> None:
    """Each block rounds the sum of dW, and sixteen of them reach the family's cap."""
    spec = Loss(hidden=2304, vocabulary=163840)
    tuning: Any = family_module("linear_cross_entropy", "tuning")
    for rows in (8192, 16384, 32768):
        tried = tuning.space(spec, {"rows": rows, "hidden": 2304, "vocabulary": 163840})
        rounded = [c for c in tried if c["accumulate"] == "storage"]
        assert all(-(-rows // c["rows"]) <= 8 for c in rounded)
    table = json.loads((Path(tuning.__file__).parent / "configs" / "nvidia_h200.json").read_text())
    for row in table["rows"]:
        if row["config"]["accumulate"] == "storage":
            assert -(-row["bucket"]["rows"] // row["config"]["rows"]) <= 8
