"""A claimed operator is proven on the class itself; anything with a twist is not bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onboarding.stages.parse.leaves import visible_pairs
from onboarding.stages.parse.uses.gates import probe_gate, prove_gated_mlp
from onboarding.stages.parse.uses.norms import prove_norm

WIDTH = 96


class Norm(nn.Module):
    """RMSNorm in the usual form; subclasses add one twist each."""

    eps_name = "variance_epsilon"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon = 1e-5

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scaled(x)


class OffsetNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1.0 + self.weight) * self.scaled(x)


class HiddenFactor(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.0001 * self.weight * self.scaled(x)


class OtherEpsilon(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-5)


class Centred(Norm):
    """The mean is taken off after the scale, which is no LayerNorm either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (self.scaled(x) - x.mean(-1, keepdim=True))


class StoppedGradient(Norm):
    """Right forward, wrong backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach()


class Gated(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.weight * self.scaled(x) * F.silu(gate)


class GateBefore(Norm):
    """Mamba-2's order: the gate goes in before the norm."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.weight * self.scaled(x * F.silu(gate))


def test_honest_norms_are_proven() -> None:
    found = [prove_norm(module, WIDTH, False, "bfloat16") for module in (Norm(), OffsetNorm())]
    assert found[0] is not None
    assert found[1] is not None
    (plain, names), (offset, _) = found[0], found[1]
    assert names == {"weight": "weight"}
    assert (plain.offset, plain.eps, plain.hidden) == (False, 1e-5, WIDTH)
    assert offset.offset
    gated = prove_norm(Gated(), WIDTH, True, "bfloat16")
    assert gated is not None
    assert gated[0].gate == "silu"


class OwnNames(nn.Module):
    """A LayerNorm that calls its scale and its bias otherwise, the bias first."""

    def __init__(self) -> None:
        super().__init__()
        self.added, self.gain = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), 1 + self.gain, self.added, self.eps)


def test_a_norm_may_call_its_parameters_as_it_likes() -> None:
    found = prove_norm(OwnNames(), WIDTH, False, "bfloat16")
    assert found is not None
    spec, names = found
    assert (spec.centred, spec.offset, spec.bias) == (True, True, True)
    assert names == {"weight": "gain", "bias": "added"}


@pytest.mark.parametrize("twisted", [HiddenFactor, OtherEpsilon, Centred, StoppedGradient])
def test_a_norm_with_a_twist_is_not_bound(twisted: type[nn.Module]) -> None:
    assert prove_norm(twisted(), WIDTH, False, "bfloat16") is None


def test_a_gate_in_another_place_is_not_bound() -> None:
    assert prove_norm(GateBefore(), WIDTH, True, "bfloat16") is None


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_not_taken_for_rms_norm(bias: bool) -> None:
    found = prove_norm(nn.LayerNorm(WIDTH, bias=bias), WIDTH, False, "bfloat16")
    assert found is not None
    spec = found[0]
    assert (spec.centred, spec.bias, spec.offset, spec.eps) == (True, bias, False, 1e-5)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "sigmoid"])
def test_activations_are_read_off_their_values(name: str) -> None:
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
    }
    function = functions[name]
    flags = probe_gate(lambda gate, up: function(gate) * up)
    assert flags is not None
    assert (flags.activation, flags.limit, flags.alpha, flags.up_offset) == (name, None, 1.0, 0.0)


def test_the_gate_of_gpt_oss_is_read_off_its_values() -> None:
    def gate_function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    flags = probe_gate(gate_function)
    assert flags is not None
    assert (flags.activation, flags.limit, flags.alpha, flags.up_offset) == ("silu", 7.0, 1.702, 1.0)


def test_an_unknown_gate_is_not_read() -> None:
    assert probe_gate(lambda gate, up: torch.tanh(gate) * up) is None
    assert probe_gate(lambda gate, up: F.silu(gate) * up * up) is None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 160, bias=False), nn.Linear(64, 160, bias=False)
        self.down_proj = nn.Linear(160, 64, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class OtherNames(nn.Module):
    """Names tell nothing: which projection is the gate shows in the values."""

    def __init__(self) -> None:
        super().__init__()
        self.w3, self.w1, self.w2 = nn.Linear(64, 160), nn.Linear(64, 160), nn.Linear(160, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.w2(F.gelu(self.w1(x)) * self.w3(x))
        return y


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(64, 320, bias=False), nn.Linear(160, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_proj(up * F.silu(gate))
        return y


class Scaled(Mlp):
    """The operator is right, but something happens around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class Residual(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def test_gated_feed_forwards_are_proven() -> None:
    plain: Any = prove_gated_mlp(Mlp(), "bfloat16")
    assert plain.attributes == {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    assert (plain.spec.width, plain.spec.activation, plain.spec.layout) == (160, "silu", "separate")
    other: Any = prove_gated_mlp(OtherNames(), "bfloat16")
    assert other.attributes == {"gate": "w1", "up": "w3", "down": "w2"}
    assert other.spec.activation == "gelu"
    joined: Any = prove_gated_mlp(Joined(), "bfloat16")
    assert joined.attributes == {"gate_up": "gate_up_proj", "down": "down_proj"}
    assert joined.spec.layout == "concatenated"


@pytest.mark.parametrize("twisted", [Scaled, Residual])
def test_a_feed_forward_with_more_in_it_is_not_bound(twisted: type[nn.Module]) -> None:
    assert prove_gated_mlp(twisted(), "bfloat16") is None


@pytest.mark.parametrize("t", [1, 5, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 200])
def test_visible_pairs_are_what_a_mask_holds(t: int, window: int | None) -> None:
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    mask = (j <= i) & (i - j < (window or t))
    assert visible_pairs(t, t, causal=True, window=window) == int(mask.sum())
    assert visible_pairs(t, 2 * t, causal=False, window=None) == 2 * t * t
