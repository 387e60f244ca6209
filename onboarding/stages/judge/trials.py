"""Draws what a candidate is tried with: cases of its family, values, layouts, and a twist for each case."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_templates import tolerance
from kernel_templates.case import Case
from kernel_templates.registry import family_module
from kernel_templates.spec import OperatorSpec
from onboarding.stages.judge import oracle
from onboarding.stages.judge.oracle import Call

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
"""How often the values of a case are drawn before it counts as one that cannot tell."""


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

    @property
    def conclusive(self) -> bool:
        """Every result that holds anything would miss its tolerance if it were worthless."""
        return all(share > 1.0 for share in self.sensitivity.values())

    @property
    def well_posed(self) -> bool:
        """Its exact results are stable enough for a limit to mean something."""
        return all(call.well_posed for call in self.calls)


def draw(spec: OperatorSpec, count: int, level: str, device: torch.device, seed: int) -> Iterator[Trial]:
    """At most ``count`` trials; the same seed gives the same. A case whose values are never well posed is void."""
    rng = random.Random(seed)
    cases = family_module(spec.family, "cases").cases(spec, rng, count, level)
    first = rng.randrange(len(TWISTS))
    for i, case in enumerate(cases[:count]):
        # every third case in fp32: there a wrong formula has nowhere to hide
        dtype = "float32" if i % 3 == 2 else spec.dtype
        twist = TWISTS[(first + i) % len(TWISTS)]
        sub = spec.resized(dtype=dtype)
        for _ in range(DRAWS):
            generator = torch.Generator(device).manual_seed(rng.getrandbits(62))
            trial = _trial(sub, dataclasses.replace(case, dtype=dtype), twist, generator, rng, device)
            if trial.conclusive and trial.well_posed:
                break
        if trial.well_posed:
            yield trial


def _trial(
    spec: OperatorSpec, case: Case, twist: str, generator: torch.Generator, rng: random.Random, device: torch.device
) -> Trial:
    first = oracle.expect(_call(spec, case, generator, device))
    second = oracle.expect(_call(spec, case, generator, device))
    third, twist, expanded = _twisted(first, twist, rng)
    told = {n: oracle.sensitivity(e, first) for n, e in first.expected.items()}
    return Trial(
        case=case,
        spec=spec,
        twist=twist,
        calls=(first, second, third),
        sensitivity={n: share for n, share in told.items() if share is not None},
        layout=twist if twist in ("transposed", "split", "offset") else "plain",
        upstream_layout=twist if twist in ("transposed", "split", "offset") else "plain",
        expanded=expanded,
    )


def _call(spec: OperatorSpec, case: Case, generator: torch.Generator, device: torch.device) -> Call:
    dtype = oracle.working_dtype(spec)
    tensors = family_module(spec.family, "cases").make_tensors(spec, case, generator, dtype, device)
    upstream = oracle.draw_upstream(spec, tensors, generator)
    return Call(spec=spec, tensors=tensors, upstream=upstream, needs=oracle.differentiable(spec, tensors))


def _twisted(call: Call, twist: str, rng: random.Random) -> tuple[Call, str, tuple[str, int]]:
    """The third call; a twist that the operator has no room for becomes ``offset``."""
    if twist == "ones":
        ones = {n: torch.ones_like(g) for n, g in call.upstream.items()}
        return oracle.expect(dataclasses.replace(call, upstream=ones, expected={})), twist, ("", 0)
    if twist == "missing" and len(call.upstream) > 1:
        gone = rng.choice(sorted(call.upstream))
        rest = {n: g for n, g in call.upstream.items() if n != gone}
        return oracle.expect(dataclasses.replace(call, upstream=rest, expected={})), twist, ("", 0)
    if twist == "subset" and len(call.needs) > 1:
        some = frozenset(rng.sample(sorted(call.needs), rng.randint(1, len(call.needs) - 1)))
        expected = {n: e for n, e in call.expected.items() if not _is_gradient(n) or n.removeprefix("grad ") in some}
        return dataclasses.replace(call, needs=some, expected=expected), twist, ("", 0)
    if twist == "expanded":
        wide = [n for n, t in sorted(call.tensors.items()) if t is not None and t.ndim > 1 and t.is_floating_point()]
        found = [(n, d) for n in wide for d, size in enumerate(_sizes(call.tensors[n])[:-1]) if size > 1]
        if found:
            name, dim = rng.choice(found)
            tensor = call.tensors[name]
            assert tensor is not None
            constant = tensor.narrow(dim, 0, 1).expand_as(tensor).contiguous()
            changed = oracle.expect(dataclasses.replace(call, tensors={**call.tensors, name: constant}, expected={}))
            if not _cancels(changed):
                return changed, twist, (name, dim)
    same = dataclasses.replace(call, expected=dict(call.expected))
    return same, twist if twist in ("transposed", "split", "offset") else "offset", ("", 0)


def _cancels(call: Call) -> bool:
    """Some exact result is a difference of equal numbers: the family's own algorithm is beyond what it may claim."""
    return any(
        e.reference_error > tolerance.cap(call.spec.family, oracle.working_dtype(call.spec), _source(n))
        for n, e in call.expected.items()
    )


def _source(name: str) -> str | None:
    return name.removeprefix("grad ") if _is_gradient(name) else None


def _is_gradient(name: str) -> bool:
    return name.startswith("grad ")


def _sizes(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)
