"""Draws what a candidate is tried with: cases of its family, values, layouts, and a twist for each case.

A case is evidence only if its tolerance can tell a worthless result from a right one. Values that cannot are drawn
again; a case whose values never can is void: the candidate is not tried with it, and another case takes its place. In
the end every output and gradient is told by some case in the spec's own dtype, or more cases are drawn until it is.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_templates.case import Case
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge import oracle, steering
from onboarding.stages.judge.oracle import Call
from onboarding.stages.judge.steering import Numbers

TWISTS = ("transposed", "ones", "subset", "split", "expanded", "missing", "offset")
"""How the third call of a case differs from the first, in words in :data:`WORDS`."""
WORDS = {
    "transposed": "transposed inputs and gradients",
    "ones": "one gradient for all elements (stride 0)",
    "subset": "only some inputs require a gradient",
    "split": "inputs and gradients cut from wider tensors",
    "expanded": "an expanded input (stride 0)",
    "missing": "no gradient for one output",
    "offset": "misaligned inputs and gradients",
}
DRAWS = 4
"""How often the values of a case are drawn before it is void."""
SPARE = 8
"""Further cases of the family that may take the place of void ones, beyond as many again as were asked for."""


@dataclass(kw_only=True)
class Trial:
    """One case: a call, another at the same addresses, and a third with a twist on the first one's values."""

    case: Case
    spec: OperatorSpec
    twist: str
    calls: tuple[Call, Call, Call]
    sensitivity: dict[str, float]
    """By tensor, of the first call; only where something can be told."""
    layout: str
    """Of the third call's tensors."""
    upstream_layout: str
    expanded: tuple[str, int] = ("", 0)
    """Input and dim that the twist ``expanded`` made constant."""
    second_words: str = ""
    """What was done to the second call's values."""

    @property
    def conclusive(self) -> bool:
        """Every result that holds anything would miss its tolerance if it were worthless."""
        return all(share > 1.0 for share in self.sensitivity.values())

    @property
    def well_posed(self) -> bool:
        """Its exact results are stable enough for a limit to mean something."""
        return all(call.well_posed for call in self.calls)


@dataclass(kw_only=True)
class Tally:
    """What the drawn cases can tell."""

    void: int = 0
    """Cases that were not tried because they could not tell."""
    told: Counter[str] = dataclasses.field(default_factory=Counter)
    """By output or gradient: cases that would refuse a worthless result."""
    settled: set[str] = dataclasses.field(default_factory=set)
    """Outputs and gradients that a case in the spec's own dtype tells."""

    @property
    def untold(self) -> set[str]:
        """What holds something in some case, and no case in the spec's own dtype tells."""
        return set(self.told) - self.settled


def draw(
    spec: OperatorSpec,
    count: int,
    level: str,
    device: torch.device,
    seed: int,
    *,
    numbers: Numbers | None = None,
    tally: Tally | None = None,
) -> Iterator[Trial]:
    """Trials: ``count`` cases of the family, and those that :mod:`steering` adds; the same seed gives the same.

    Args:
        numbers: of the candidate's source.
        tally: counted up along the way.
    """
    rng = random.Random(seed)
    tally = tally if tally is not None else Tally()
    numbers = numbers or Numbers()
    known = family_module(spec.family, "cases").cases(spec, rng, 2 * count + SPARE, level)
    planned = known[:count] + steering.cases(spec, known, count, numbers, level, rng)
    spare = known[count:]
    first = rng.randrange(len(TWISTS))
    turn = 0
    while planned or ((tally.untold or not tally.told) and spare):
        needed = not planned
        case = planned.pop(0) if planned else spare.pop(0)
        # every third case in fp32: there a wrong formula has nowhere to hide
        dtype = "float32" if turn % 3 == 2 and not needed else spec.dtype
        twist = TWISTS[(first + turn) % len(TWISTS)]
        trial = _drawn(
            spec.resized(dtype=dtype), dataclasses.replace(case, dtype=dtype), twist, turn, numbers, rng, device
        )
        turn += 1
        if trial is None:
            tally.void += 1
            planned += spare[:1]
            del spare[:1]
            continue
        tally.told.update(trial.sensitivity.keys())
        tally.settled |= trial.sensitivity.keys() if dtype == spec.dtype else set()
        yield trial


def _drawn(
    spec: OperatorSpec,
    case: Case,
    twist: str,
    turn: int,
    numbers: Numbers,
    rng: random.Random,
    device: torch.device,
) -> Trial | None:
    """The case with values that can tell; None if none of some draws can."""
    for _ in range(DRAWS):
        generator = torch.Generator(device).manual_seed(rng.getrandbits(62))
        first = oracle.expect(_call(spec, case, generator, device))
        told = {name: oracle.sensitivity(expected, first) for name, expected in first.expected.items()}
        sensitivity = {name: share for name, share in told.items() if share is not None}
        if not first.well_posed or not all(share > 1.0 for share in sensitivity.values()):
            continue
        second, words = _second(spec, case, turn, numbers, rng, generator, device)
        third, twist, expanded = _twisted(first, twist, rng)
        trial = Trial(
            case=case,
            spec=spec,
            twist=twist,
            calls=(first, second, third),
            sensitivity=sensitivity,
            layout=twist if twist in ("transposed", "split", "offset") else "plain",
            upstream_layout=twist if twist in ("transposed", "split", "offset") else "plain",
            expanded=expanded,
            second_words=words,
        )
        if trial.well_posed:
            return trial
    return None


def _second(
    spec: OperatorSpec,
    case: Case,
    turn: int,
    numbers: Numbers,
    rng: random.Random,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Call, str]:
    """Fresh values, some of them far larger; plain ones where the operator's own algorithm cannot take that."""
    call = _call(spec, case, generator, device)
    for attempt in range(2):
        tensors, words = steering.spread(call.tensors, turn + attempt, numbers.values, rng, generator)
        wide = dataclasses.replace(call, tensors=tensors, expected={})
        if words and oracle.expect(wide).well_posed:
            return wide, words
    return oracle.expect(call), ""


def _call(spec: OperatorSpec, case: Case, generator: torch.Generator, device: torch.device) -> Call:
    dtype = oracle.working_dtype(spec)
    tensors = family_module(spec.family, "cases").make_tensors(spec, case, generator, dtype, device)
    upstream = oracle.draw_upstream(spec, tensors, generator)
    return Call(spec=spec, tensors=tensors, upstream=upstream, needs=oracle.differentiable(spec, tensors))


def _twisted(call: Call, twist: str, rng: random.Random) -> tuple[Call, str, tuple[str, int]]:
    """The third call; a twist that the operator has no room for, or cannot take, becomes ``offset``."""
    changed, expanded = _changed(call, twist, rng)
    if changed is not None and oracle.expect(changed).well_posed:
        return changed, twist, expanded
    if twist == "subset" and len(call.needs) > 1:
        some = frozenset(rng.sample(sorted(call.needs), rng.randint(1, len(call.needs) - 1)))
        return restricted(call, some), twist, ("", 0)
    same = dataclasses.replace(call, expected=dict(call.expected))
    return same, twist if twist in ("transposed", "split", "offset") else "offset", ("", 0)


def _changed(call: Call, twist: str, rng: random.Random) -> tuple[Call | None, tuple[str, int]]:
    """The call with other values, for the twists that need them; and the input and dim that became constant."""
    if twist == "ones":
        ones = {n: torch.ones_like(g) for n, g in call.upstream.items()}
        widest = max((_sizes(g)[-1] for g in ones.values() if g.ndim and g.numel()), default=1)
        return dataclasses.replace(call, upstream=ones, expected={}, upstream_repeats=widest), ("", 0)
    if twist == "missing" and len(call.upstream) > 1:
        gone = rng.choice(sorted(call.upstream))
        rest = {n: g for n, g in call.upstream.items() if n != gone}
        return dataclasses.replace(call, upstream=rest, expected={}), ("", 0)
    if twist == "expanded":
        wide = [n for n, t in sorted(call.tensors.items()) if t is not None and t.ndim > 1 and t.is_floating_point()]
        found = [(n, d) for n in wide for d, size in enumerate(_sizes(call.tensors[n])[:-1]) if size > 1]
        if found:
            name, dim = rng.choice(found)
            tensor = call.tensors[name]
            assert tensor is not None
            constant = tensor.narrow(dim, 0, 1).expand_as(tensor).contiguous()
            tensors = {**call.tensors, name: constant}
            changed = dataclasses.replace(call, tensors=tensors, expected={}, repeats=tensor.shape[dim])
            return changed, (name, dim)
    return None, ("", 0)


def restricted(call: Call, needs: frozenset[str]) -> Call:
    """The same call where only some inputs require a gradient."""
    expected = {n: e for n, e in call.expected.items() if not _is_gradient(n) or n.removeprefix("grad ") in needs}
    return dataclasses.replace(call, needs=needs, expected=expected)


def _is_gradient(name: str) -> bool:
    return name.startswith("grad ")


def _sizes(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)
