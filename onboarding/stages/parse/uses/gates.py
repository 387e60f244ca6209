"""Gated activations: what a feed-forward does between its projections, found by probing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernel_templates.gated_activation.spec import Spec
from onboarding.stages.parse.uses.instance import small_instance
from onboarding.stages.parse.uses.proof import same_function

GateFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(gate, up) -> what the down projection reads."""

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, kw_only=True)
class GateFlags:
    """The semantic flags of a gate."""

    activation: str
    limit: float | None
    alpha: float
    up_offset: float


def probe_gate(function: GateFunction) -> GateFlags | None:
    """Read a gate's flags off its values: the offset of up, the clamp, the activation and its scale.

    y(g, u) = act(min(g, limit)) (clamp(u) + offset): linear in u near zero, so y(g, 0) / (y(g, 1) - y(g, 0)) is the
    offset; a huge u gives the clamp; y at u = 1 gives the activation.
    """
    g = torch.linspace(-3.0, 3.0, 25, dtype=torch.float64) + 0.0625
    one, zero = torch.ones_like(g), torch.zeros_like(g)
    try:
        at_zero, at_half, at_one = function(g, zero), function(g, one / 2), function(g, one)
        huge = function(torch.full_like(g, 1.0), torch.full_like(g, 1e6))
    except Exception:  # not a function of two tensors of this shape
        return None
    slope = at_one - at_zero
    if slope.shape != g.shape or not bool(torch.isfinite(slope).all()) or float(slope.abs().max()) == 0:
        return None
    if float((at_half - at_zero - slope / 2).abs().max()) > 1e-5:
        return None  # not linear in up
    strongest = int(slope.abs().argmax())
    offset = _rounded(float(at_zero[strongest] / slope[strongest]))
    at_gate_one = float((function(one, one) - function(one, zero))[0])
    saturated = _rounded(float(huge[0]) / at_gate_one - offset) if at_gate_one else 1e6
    limit = saturated if saturated < 0.999e6 else None
    ratio = min(max(at_gate_one, 1e-9), 1 - 1e-9)
    alpha = _rounded(float(torch.logit(torch.tensor(ratio, dtype=torch.float64))))
    for name, activation in _ACTIVATIONS.items():
        if float((activation(g) - slope).abs().max()) < 1e-5:
            return GateFlags(activation=name, limit=limit, alpha=1.0, up_offset=offset)
    if float((g * torch.sigmoid(alpha * g) - slope).abs().max()) < 1e-5:
        return GateFlags(activation="silu", limit=limit, alpha=alpha, up_offset=offset)
    return None


def _rounded(value: float) -> float:
    """Six significant digits: probing in fp32 leaves noise after them."""
    return float(f"{value:.6g}") if abs(value) > 1e-6 else 0.0


@dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """A proven gated feed-forward."""

    spec: Spec
    attributes: dict[str, str]
    """``gate``, ``up`` and ``down``, or ``gate_up`` and ``down`` -> name of the projection."""


class _Fixed(nn.Module):
    """Stands in for a projection: gives a fixed tensor, whatever it reads."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value


def _projections(module: nn.Module) -> list[tuple[dict[str, str], str]]:
    """Possible readings of a module's linear children: names by part, and the layout."""
    linear = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    readings: list[tuple[dict[str, str], str]] = []
    if len(linear) == 3:
        for down, last in linear.items():
            rest = [name for name in linear if name != down]
            shapes = {(linear[n].in_features, linear[n].out_features) for n in rest}
            if shapes == {(last.out_features, last.in_features)}:
                for gate, up in (rest, rest[::-1]):
                    readings.append(({"gate": gate, "up": up, "down": down}, "separate"))
    elif len(linear) == 2:
        for gate_up, down in (list(linear), list(linear)[::-1]):
            if linear[gate_up].out_features == 2 * linear[down].in_features:
                for layout in ("concatenated", "interleaved"):
                    readings.append(({"gate_up": gate_up, "down": down}, layout))
    return readings


def joined(gate: torch.Tensor, up: torch.Tensor, layout: str) -> torch.Tensor:
    """Gate and up as one tensor, in halves or in alternating columns."""
    if layout == "concatenated":
        return torch.cat([gate, up], dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def _gate_function(module: nn.Module, parts: dict[str, str], layout: str) -> GateFunction:
    def function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        clone = small_instance(module, {}, torch.Generator())
        children = clone.__dict__["_modules"]
        if layout == "separate":
            children[parts["gate"]], children[parts["up"]] = _Fixed(gate), _Fixed(up)
        else:
            children[parts["gate_up"]] = _Fixed(joined(gate, up, layout))
        children[parts["down"]] = nn.Identity()
        result: torch.Tensor = clone(torch.zeros_like(gate))
        return result

    return function


def prove_gated_mlp(module: nn.Module, dtype: str) -> GatedMlp | None:
    """The gated activation inside a feed-forward, or None.

    Proven on a small instance of the very class: ``down(reference(gate(x), up(x)))`` equals the module.
    """
    for parts, layout in _projections(module):
        down = module.get_submodule(parts["down"])
        assert isinstance(down, nn.Linear)
        stubs = _without_projections(module, parts)
        flags = probe_gate(_gate_function(stubs, parts, layout))
        if flags is None:
            continue
        spec = Spec(
            width=down.in_features,
            activation=flags.activation,
            layout=layout,
            limit=flags.limit,
            alpha=flags.alpha,
            up_offset=flags.up_offset,
            dtype=dtype,
        )
        if _proven(module, spec, parts, down.out_features):
            return GatedMlp(spec=spec, attributes=parts)
    return None


def _without_projections(module: nn.Module, parts: dict[str, str]) -> Any:
    """The module with its projections taken out, so that copies of it are cheap."""
    sizes = {size: 2 for p in module.parameters() for size in p.shape}
    clone = small_instance(module, sizes, torch.Generator().manual_seed(3))
    for name in parts.values():
        clone.__dict__["_modules"][name] = nn.Identity()
    return clone


def _proven(module: nn.Module, spec: Spec, parts: dict[str, str], hidden: int) -> bool:
    generator = torch.Generator().manual_seed(5)
    sizes = small_sizes(hidden, spec.width)
    clone = small_instance(module, sizes, generator)
    small = spec.resized(width=sizes[spec.width])
    scale = 4.0 * (spec.limit or 1.0)  # wide enough that a clamp acts
    x = torch.randn(7, sizes[hidden], generator=generator) * scale

    def parameters(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        # the projections' outputs are the operator's inputs: hand them in by fixed stand-ins
        run = small_instance(clone, {}, torch.Generator())
        run.__dict__["_modules"] = dict(clone.__dict__["_modules"])
        for part in ("gate", "up") if spec.layout == "separate" else ("gate_up",):
            value = tensors[part]
            assert value is not None
            run.__dict__["_modules"][parts[part]] = _Fixed(value)
        run.__dict__["_modules"][parts["down"]] = nn.Identity()
        return {"y": run(x)}

    names = ("gate", "up") if spec.layout == "separate" else ("gate_up",)
    tensors = {name: clone.get_submodule(parts[name])(x).detach() for name in names}
    if not same_function(parameters, small, tensors):
        return False
    # and nothing else happens around the projections
    from kernel_templates.registry import family_module

    reference = family_module(spec.family, "reference").reference
    inner = reference(tensors, small)["y"]
    return bool(torch.allclose(clone(x), clone.get_submodule(parts["down"])(inner), rtol=1e-4, atol=1e-5 * scale))


def small_sizes(hidden: int, inner: int) -> dict[int, int]:
    """Small sizes that keep what is equal equal and what is twice the other twice the other."""
    small = {
        hidden: 24,
        inner: 24 if hidden == inner else 12 if hidden == 2 * inner else 48 if inner == 2 * hidden else 40,
    }
    small.setdefault(2 * inner, 2 * small[inner])
    return small
