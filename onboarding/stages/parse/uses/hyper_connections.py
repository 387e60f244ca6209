"""Hyper-connections: claimed by the shapes of a module's parameters, proven on the class itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from kernel_templates.hyper_connection.spec import MOST_STREAMS, Spec
from onboarding.stages.parse.roles import epsilon_of
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function

MOST_ROUNDS = 100
HIDDEN = 12
TOLERANCE = 1e-4
"""Relative RMS difference: the modules compute in fp32 and walk through twenty rounds of divisions."""


@dataclass(frozen=True, kw_only=True)
class HyperConnection:
    """A proven hyper-connection."""

    spec: Spec
    attributes: dict[str, str]
    """``fn``, ``base``, ``scale`` -> name of the parameter; ``returns`` -> outputs in the module's order."""


def is_hyper_connection(module: nn.Module, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a module called with streams [..., n, C] holds a matrix over all of them and two vectors."""
    return len(shapes) == 1 and len(shapes[0]) >= 3 and _parameters(module, *shapes[0][-2:]) is not None


def _parameters(module: nn.Module, streams: int, hidden: int) -> dict[str, str] | None:
    """Names of fn [M, n C], base [M] and scale [1 to 3], or None."""
    own = dict(module.named_parameters(recurse=False))
    matrices = [name for name, p in own.items() if p.dim() == 2 and p.shape[1] == streams * hidden]
    if len(own) != 3 or len(matrices) != 1 or not 1 < streams <= MOST_STREAMS:
        return None
    columns = own[matrices[0]].shape[0]
    base = [name for name, p in own.items() if p.shape == (columns,)]
    scale = [name for name, p in own.items() if p.dim() == 1 and p.shape[0] <= 3 and name not in base]
    return {"fn": matrices[0], "base": base[0], "scale": scale[0]} if len(base) == len(scale) == 1 else None


def prove_hyper_connection(
    module: nn.Module, shapes: tuple[tuple[int, ...], ...], dtype: str
) -> HyperConnection | None:
    """The hyper-connection that a module computes, or None: its constants are tried until one fits numerically."""
    streams, hidden = shapes[0][-2:]
    names = _parameters(module, streams, hidden)
    norms = [eps for child in module.children() if (eps := epsilon_of(child)) is not None]
    if names is None or len(norms) != 1:
        return None
    columns = module.get_parameter(names["fn"]).shape[0]
    parts = module.get_parameter(names["scale"]).shape[0]
    if columns != streams * (1, 2, 2 + streams)[parts - 1]:
        return None
    small = small_instance(
        module, {hidden: HIDDEN, streams * hidden: streams * HIDDEN}, torch.Generator().manual_seed(23)
    )
    numbers = [v for v in vars(module).values() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    floors = list(dict.fromkeys([v for v in numbers if isinstance(v, float) and 0 < v < 0.1] or [0.0]))
    factors = list(dict.fromkeys([2.0, *(float(v) for v in numbers if 0.1 <= v <= 100)])) if parts > 1 else [2.0]
    rounds = [v for v in numbers if isinstance(v, int) and 0 < v <= MOST_ROUNDS] if parts > 2 else [0]
    for floor, factor, count, raised in product(floors, factors, rounds, (False, True)):
        spec = Spec(
            hidden=hidden,
            streams=streams,
            eps=norms[0],
            floor=floor,
            post=parts > 1,
            post_factor=factor,
            post_floor=floor if raised else 0.0,
            rounds=count,
            dtype=dtype,
        )
        order = _proven(small, spec, names)
        if order is not None:
            return HyperConnection(spec=spec, attributes={**names, "returns": " ".join(order)})
        if parts == 1:
            break
    return None


def _proven(small: nn.Module, spec: Spec, names: dict[str, str]) -> list[str] | None:
    """The outputs in the module's order when it computes ``spec``, else None."""
    generator = torch.Generator().manual_seed(29)
    claimed = spec.resized(hidden=HIDDEN)
    n = spec.streams
    shapes = {(2, 5, HIDDEN): "h", (2, 5, n): "post", (2, 5, n, n): "comb"}
    order: list[str] = []

    def run(given: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        values = {names[name]: given[name] for name in ("fn", "base", "scale")}
        found = torch.func.functional_call(small, values, (given["x"],))  # type: ignore[arg-type]
        found = found if isinstance(found, tuple) else (found,)
        order[:] = [shapes[tuple(t.shape)] for t in found]
        return dict(zip(order, found, strict=True))

    # the second size makes the norm's epsilon as large as the mean square, so that a wrong one shows
    for size in (1.0, spec.eps**0.5):
        tensors = {
            "x": size * torch.randn(2, 5, n, HIDDEN, generator=generator),
            "fn": torch.randn(claimed.columns, n * HIDDEN, generator=generator) * HIDDEN**-0.5,
            "base": torch.randn(claimed.columns, generator=generator),
            "scale": 1.0 + 0.3 * torch.randn(claimed.parts, generator=generator),
        }
        if not same_function(run, claimed, tensors, TOLERANCE):
            return None
    return list(order)
