"""200 automatic mutants of the shipped kernels: those that compute something else are refused.

``python tests/judge/test_mutants.py [FIRST LAST]`` prints every survivor. A survivor is either in ``EQUIVALENT``,
with the reason why it computes the same, or a hole in the judge.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutating import Mutant, mutants
from planting import KDA, MOE, NORM, RESIDUAL_NORM, SWIGLU, candidate, make_spec, verdict
from warmed import warm_parent  # noqa: F401  (a fixture)

from kernel_templates.spec import OperatorSpec
from onboarding.sandbox import Limits

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
LIMITS = Limits(wall_s=400.0, memory_bytes=3 * 2**30, output_bytes=2**20, scratch_bytes=256 * 2**20)
SEED = 20261201
# family, flags, mutants, cases of a verdict
PLAN = (
    ("norm", NORM, 70, 6),
    ("norm", RESIDUAL_NORM, 40, 6),
    ("gated_activation", SWIGLU | {"limit": 7.0}, 50, 6),
    ("moe", MOE, 20, 3),
    ("linear_attention", KDA, 20, 3),
)
# pattern of the words -> why it computes the same on every input that the contract allows
EQUIVALENT: dict[str, str] = {
    r"in `if rows > 0 and hidden > 0:`$": "a launch of no programs does nothing, and no tensor has rows of no columns",
    r"numel\(\) >= 0 in `if (dy|y).numel\(\) > 0:`$": "a launch of no programs does nothing",
    r"^moe: end - start -> end \+ start in `if end - start <= TAIL_M": "the path for long tiles serves short ones, too",
    r"^moe: end - start <= TAIL_M -> end - start < TAIL_M": "both paths give the same, one is quicker for short tiles",
    r"^moe: owner < E -> owner <= E": "past the last tile every bin has ended: owner is BINS, a power of two above E",
    r"^gated_activation: up_RC \+ 0\.0 -> ": "zero is added",
    r"in `if hidden > MAX_HIDDEN:`$": "differs at 2^20 columns only, where both the check and a tile end",
    r"^norm: 0\.0 -> 0\.125 in `(unit|dunit|gate)_RD = ": "masked lanes of a product whose other factor is zero there",
    r"^norm: 0\.0 -> 0\.125 in `(rstd_R|scale_D) = ": "masked lanes of a product whose other factor is zero there",
    r"^norm: 0 -> 1 in `BLOCK_E=0 if hidden == first": "a second tile of one column, masked",
    r"^norm: 1 -> 2 in `BLOCK_E=0 if hidden == first": "a wider second tile, its further columns masked",
    r"^moe: end - start \+ BLOCK_M - 1 -> end - start \+ BLOCK_M in `tiles": "an empty tile more where rows fill all",
    r"^norm: 1 -> 2 in `block = 1 << min": "a wider block of programs, the further ones masked",
    r"in `tiles = -\(-rows // ": "more programs than tiles: the rest have nothing to do",
    r"in `BLOCK_D=1 << \(hidden - 1\)": "a wider tile, its further columns masked",
    r'in `return \{"(hidden|width)": tensors': "another row of the table of configurations, which change no result",
}
# pattern of the words -> why no interpreted run can tell: counted apart, not as refused
NOT_REACHED: dict[str, str] = {
    r"^norm: -hidden \* block -> -hidden in `_totals_kernel": "its table has two programs, whose sums fit one",
    r"^norm: tl.float32 -> tl.bfloat16 in `dweight_E = tl.zeros": "a compiler refuses a type that changes in a loop",
    r"^moe: .* in `more_q = ": "tiles whose sides are no powers of two, which its table lacks",
    r"^norm: 8 -> 9 in `num_warps=8": "an interpreted launch has no warps; a compiler refuses nine",
    r"^moe: (_rows_tile|out \+ row).*(_rows_tile|value_RD)": "the path for long tiles, which its table lacks",
}


def planned() -> Iterator[tuple[OperatorSpec, Mutant, int]]:
    for number, (family, flags, count, cases) in enumerate(PLAN):
        spec = make_spec(family, flags)
        for mutant in mutants(candidate(spec).decode(), count, SEED + number):
            yield spec, mutant, cases


def survives(spec: OperatorSpec, mutant: Mutant, cases: int, folder: Path) -> bool:
    found = verdict(mutant.source, spec, folder, cases=cases, seed=11, limits=LIMITS, answer_s=20.0)
    return found.outcome == "accepted"


def explained(spec: OperatorSpec, mutant: Mutant) -> bool:
    return any(re.search(pattern, f"{spec.family}: {mutant.words}") for pattern in EQUIVALENT)


@pytest.mark.timeout(3600)
def test_mutants_are_refused(tmp_path: Path) -> None:
    refused, equivalent, unreached, survivors = 0, 0, 0, []
    for number, (spec, mutant, cases) in enumerate(planned()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if not survives(spec, mutant, cases, folder):
            refused += 1
        elif explained(spec, mutant):
            equivalent += 1
        elif any(re.search(pattern, f"{spec.family}: {mutant.words}") for pattern in NOT_REACHED):
            unreached += 1
        else:
            survivors.append(f"{spec.family}: {mutant.words}")
    print(
        f"{refused} mutants refused; accepted: {equivalent} equivalent, {unreached} not reached, {len(survivors)} wrong"
    )
    assert len(survivors) <= (refused + len(survivors)) / 100, "\n".join(survivors)


def test_mutants_are_many_and_different() -> None:
    found = [mutant.source for _, mutant, _ in planned()]
    assert len(found) == len(set(found)) == sum(count for _, _, count, _ in PLAN)


if __name__ == "__main__":
    from onboarding.sandbox import warm

    warm.prestart()
    first, last = (int(a) for a in (*sys.argv[1:], "0", "200")[:2])
    for at, (its_spec, its_mutant, its_cases) in enumerate(planned()):
        if first <= at < last:
            with tempfile.TemporaryDirectory() as scratch:
                alive = survives(its_spec, its_mutant, its_cases, Path(scratch))
            if alive:
                known = "explained" if explained(its_spec, its_mutant) else "SURVIVES"
                print(at, known, f"{its_spec.family}: {its_mutant.words}", flush=True)
            elif at % 10 == 0:
                print(at, "...", flush=True)
