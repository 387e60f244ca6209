"""Fresh memory never looks the same twice, and what surrounds a candidate is compared."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from onboarding.stages.judge import fresh
from onboarding.stages.judge.surroundings import changed, surroundings


def test_calls_find_other_things_in_fresh_memory() -> None:
    found = []
    for number in range(3):
        fresh.turn(number)
        found.append(fresh.fill(torch.zeros(3000, 2)))
    nan, ordinary, large = found
    assert bool(nan.isnan().all())
    assert bool(ordinary.isfinite().all())
    assert 0.9 < float(ordinary.std()) < 1.1
    assert float(large.min()) == torch.finfo(torch.float32).max / 4
    fresh.turn(1)
    assert 0 <= int(fresh.fill(torch.zeros(50, dtype=torch.int32)).max()) < 64
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.uint8):
        assert fresh.fill(torch.zeros(3, dtype=dtype).expand(3)).shape == (3,)
        assert fresh.fill(torch.empty(0, 4, dtype=dtype)).numel() == 0
    fresh.turn(0)


def test_every_way_to_fresh_memory_is_watched() -> None:
    ways = """
import torch
from onboarding.stages.judge import fresh
fresh.watch()
x = torch.ones(2, 3)
made = [torch.empty(2, 3), torch.empty_like(x), torch.empty_strided((2, 3), (1, 2)), x.new_empty(4)]
made.append(x.new_empty_strided((2, 3), (1, 2)))
assert all(bool(t.isnan().all()) for t in made), made
assert made[2].stride() == (1, 2)
assert torch.empty(3, device="meta").is_meta
"""
    subprocess.run([sys.executable, "-c", ways], check=True, env=os.environ | {"PYTHONPATH": "."}, timeout=120)


def test_changes_around_a_candidate_are_named() -> None:
    cpu = torch.device("cpu")
    before = surroundings(cpu)
    assert changed(before, surroundings(cpu)) == []
    state = torch.get_rng_state()
    torch.rand(1)
    assert changed(before, surroundings(cpu)) == ["the random state"]
    torch.set_rng_state(state)
    with torch.no_grad():
        assert changed(before, surroundings(cpu)) == ["whether gradients are recorded"]
    assert changed(before, surroundings(cpu)) == []
