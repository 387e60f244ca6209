"""The judge refuses no shipped kernel by chance: verdicts over many seeds, all accepted, all conclusive.

``python tests/judge/test_seeds.py FIRST LAST [FAMILY...]`` runs any range of seeds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from planting import KDA, MOE, NORM, PLAIN_NORM, RESIDUAL_NORM, SWIGLU, candidate, make_spec, verdict
from warmed import warm_parent  # noqa: F401  (a fixture)

from onboarding.problem import Problem

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated norm": ("norm", NORM),
    "norm": ("norm", PLAIN_NORM),
    "residual norm": ("norm", RESIDUAL_NORM),
    "swiglu": ("gated_activation", SWIGLU),
    "clamped swiglu": (
        "gated_activation",
        {"width": 100, "limit": 7.0, "layout": "interleaved", "up_offset": 1.0, "alpha": 1.702},
    ),
    "convolution": ("short_convolution", {"channels": 48, "bias": True, "states": True}),
    "experts": ("moe", MOE),
    "clamped experts": ("moe", MOE | {"limit": 7.0, "bias": True}),
    "delta attention": ("linear_attention", KDA),
    "gated delta": ("linear_attention", KDA | {"decay": "head"}),
}
SEEDS = {"experts": 10, "clamped experts": 10, "delta attention": 8, "gated delta": 8}
"""How many seeds in the slow tests; 40 for the cheap ones: 276 verdicts together."""


def refusals(name: str, seeds: range, cases: int = 6) -> list[str]:
    """What went wrong, by seed."""
    family, flags = KERNELS[name]
    spec = make_spec(family, flags)
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = verdict(candidate(spec), spec, Path(folder), cases=cases, seed=seed)
            except Problem as problem:
                found.append(f"{name}, seed {seed}: {problem.title}")
                continue
        if result.outcome != "accepted":
            found.append(f"{name}, seed {seed}: {'; '.join(result.reasons[:2])}")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KERNELS)
def test_no_seed_refuses_a_shipped_kernel(name: str) -> None:
    assert refusals(name, range(1000, 1000 + SEEDS.get(name, 40))) == []


if __name__ == "__main__":
    from onboarding.sandbox import warm

    warm.prestart()
    first, last, *names = sys.argv[1:]
    for kernel in names or KERNELS:
        wrong = refusals(kernel, range(int(first), int(last)))
        print(f"{kernel}: {len(wrong)} refusals of {int(last) - int(first)}", *wrong, sep="\n  ", flush=True)
