"""Wrong kernels, made by one small edit of a real candidate, are refused and for the right reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planting
import pytest
from planting import KDA, MOE, NORM, PLAIN_NORM, candidate, make_spec, verdict
from warmed import warm_parent  # noqa: F401  (a fixture)

pytestmark = pytest.mark.sandbox


@dataclass(frozen=True, kw_only=True)
class Wrong:
    name: str
    family: str
    flags: dict[str, Any]
    edits: tuple[tuple[str, str], ...]
    reason: tuple[str, ...]
    """Words that the reasons must contain, all of them."""
    made_for: dict[str, Any] | None = None
    """Flags of the spec that the source is made for, where it is not the one it claims to serve."""
    cases: int = 3


WRONG = (
    Wrong(
        name="wrong mask tail",
        family="norm",
        flags=PLAIN_NORM,
        edits=(
            (
                "inside_RD = (row_R < N)[:, None] & (col_D < D)[None, :]\n\n    h_RD",
                "inside_RD = (row_R < N)[:, None] & (col_D < D + 1)[None, :]\n\n    h_RD",
            ),
        ),
        reason=("y",),
    ),
    Wrong(
        name="write past the end of its own memory",
        family="norm",
        flags=PLAIN_NORM,
        edits=(("tl.store(rstd_ptr + row_R, rstd_R, mask=row_R < N)", "tl.store(rstd_ptr + row_R, rstd_R)"),),
        reason=("it writes", "past the end of a tensor"),
    ),
    Wrong(
        name="missing gradient",
        family="norm",
        flags=NORM,
        edits=(
            ('    if weight_gradient:\n        gradients["weight"] = torch.empty_like(tensors["weight"])\n', ""),
            ("if (weight_gradient or False) and hidden > 0:", "if False:"),
        ),
        reason=("grad weight: zero everywhere",),
    ),
    Wrong(
        name="swapped gate",
        family="norm",
        flags=NORM,
        edits=(("y_RD *= tl.sigmoid(gate_RD)", "y_RD *= gate_RD * tl.sigmoid(gate_RD)"),),
        reason=("y: relative error",),
    ),
    Wrong(
        name="stale output",
        family="norm",
        flags=NORM,
        edits=(
            ("def forward(tensors, config):", "_kept = {}\n\n\ndef forward(tensors, config):"),
            (
                "    outputs, saved = outputs_like(tensors, config)\n    rows",
                "    key = tuple((t.data_ptr(), t.shape, t._version) for t in tensors.values())\n"
                "    if key in _kept:\n        outputs, saved = _kept[key]\n"
                "        return {n: t.clone() for n, t in outputs.items()}, {n: t.clone() for n, t in saved.items()}\n"
                "    outputs, saved = _kept[key] = outputs_like(tensors, config)\n    rows",
            ),
        ),
        reason=("it repeats what an earlier call returned",),
    ),
    Wrong(
        name="zeros",
        family="norm",
        flags=NORM,
        edits=(("tl.store(y_ptr + at_RD, y_RD.to(", "tl.store(y_ptr + at_RD, (0.0 * at_RD).to("),),
        reason=("y: zero everywhere",),
    ),
    Wrong(
        name="bf16 accumulation",
        family="norm",
        flags=NORM,
        edits=(
            (
                "rstd_R = tl.rsqrt(tl.sum(h_RD * h_RD, axis=1) / D + 1e-06)",
                "sum_R = tl.zeros((ROWS,), tl.bfloat16)\n"
                "    for piece in range(0, BLOCK_D, 8):\n"
                "        here_RD = ((col_D >= piece) & (col_D < piece + 8))[None, :]\n"
                "        part_R = tl.sum(tl.where(here_RD, h_RD * h_RD, 0.0), axis=1)\n"
                "        sum_R = (sum_R.to(tl.float32) + part_R).to(tl.bfloat16)\n"
                "    rstd_R = tl.rsqrt(sum_R.to(tl.float32) / D + 1e-06)",
            ),
        ),
        reason=("y: relative error", "exceeds"),
    ),
    Wrong(
        name="offset norm served by plain",
        family="norm",
        flags={"hidden": 96, "offset": True},
        made_for={"hidden": 96},
        edits=(),
        reason=("y: relative error",),
    ),
    Wrong(
        name="wrong expert offset",
        family="moe",
        flags=MOE,
        edits=(("expert.to(tl.int64) * (2 * WIDTH * D)", "expert.to(tl.int64) * (2 * WIDTH * D - D)"),),
        cases=1,
        reason=("y:",),
    ),
    Wrong(
        name="off-by-one chunk",
        family="linear_attention",
        flags=KDA,
        edits=(("for step in range(0, count):", "for step in range(0, tl.maximum(count - 1, 1)):"),),
        cases=1,
        reason=("o:",),
    ),
    Wrong(
        name="ignored initial state",
        family="linear_attention",
        flags=KDA,
        edits=(("state_KV += tl.load(initial_state + state_base + at_KV, mask=in_KV, other=0.0)", "state_KV += 0.0"),),
        cases=1,
        reason=("o:",),
    ),
)

FAMILIES = (
    ("norm", NORM),
    ("norm", planting.RESIDUAL_NORM),
    ("gated_activation", planting.SWIGLU),
    ("moe", MOE),
    ("linear_attention", KDA),
)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_kernels_are_refused(wrong: Wrong, tmp_path: Path) -> None:
    spec = make_spec(wrong.family, wrong.flags)
    source = candidate(make_spec(wrong.family, wrong.made_for or wrong.flags), *wrong.edits)
    found = verdict(source, spec, tmp_path, cases=wrong.cases)
    assert found.outcome == "refused"
    said = " | ".join(found.reasons)
    for words in wrong.reason:
        assert words in said, said


@pytest.mark.parametrize(("family", "flags"), FAMILIES, ids=lambda v: v if isinstance(v, str) else "")
def test_right_kernels_are_accepted(family: str, flags: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(family, flags)
    found = verdict(candidate(spec), spec, tmp_path, cases=2 if family in ("moe", "linear_attention") else 3, seed=11)
    assert found.outcome == "accepted", (found.seed, found.reasons)
    assert 0 < found.worst_share <= 1
    # a single case may be unable to tell (a gradient of one element that is nearly zero); all cases together may not
    named = {name for case in found.cases for name in case.sensitivity}
    assert named == {name for case in found.cases for name, share in case.sensitivity.items() if share > 1}
    assert found.level == "interpreted"
