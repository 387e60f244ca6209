"""Adapters under half-precision rows, against the same formula in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kernel_templates.tolerance import assert_close, limit, relative_rms
from runtime.experts.compute import Groups
from runtime.lora.config import LoraConfig
from runtime.lora.modules import ExpertsLora, adapt_linear

R, IN, OUT, ROWS, EXPERTS = 8, 48, 40, 64, 3
CONFIG = LoraConfig(r=R, alpha=24.0)
COUNTS = [20, 0, 44]


def _values(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradients(run: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and gradients of the sum over a fixed direction, by name."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    out = run(leaves)
    out.backward(_values(*out.shape, seed=9).to(out.dtype))  # type: ignore[no-untyped-call]
    return {"out": out.detach(), **{n: t.grad for n, t in leaves.items() if t.grad is not None}}


def _round(value: Tensor) -> Tensor:
    """To bf16 and back, both ways: what is stored in half precision in forward is so in backward."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.bfloat16().double()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return g.bfloat16().double()

    rounded: Tensor = Rounded.apply(value)  # type: ignore[no-untyped-call]
    return rounded


def _check(found: dict[str, Tensor], exact: dict[str, Tensor], rounded: dict[str, Tensor]) -> None:
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        allowed = limit("gated_activation", torch.bfloat16, relative_rms(rounded[name], expected))
        assert_close(name, found[name].double(), expected, allowed)


@pytest.mark.parametrize("shape", [(ROWS,), (2, ROWS // 2)])
def test_a_linear_layer(shape: tuple[int, ...]) -> None:
    weight = _values(OUT, IN, seed=1, scale=IN**-0.5).bfloat16()
    bias = _values(OUT, seed=2).bfloat16()
    given = {
        "x": _values(*shape, IN, seed=3).bfloat16(),
        "a": _values(R, IN, seed=4, scale=IN**-0.5).float(),
        "b": _values(OUT, R, seed=5, scale=R**-0.5).float(),
    }

    def ours(t: dict[str, Tensor]) -> Tensor:
        adapted = nn.Linear(IN, OUT).bfloat16()
        adapted.weight, adapted.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
        adapt_linear(adapted, CONFIG, torch.float32)
        del adapted.lora_A, adapted.lora_B
        adapted.__dict__.update(lora_A=t["a"], lora_B=t["b"])
        out: Tensor = adapted(t["x"])
        assert out.dtype == torch.bfloat16
        return out

    def formula(t: dict[str, Tensor], store: Callable[[Tensor], Tensor]) -> Tensor:
        base = store(nn.functional.linear(t["x"], weight.double(), bias.double()))
        return store(base + store(t["x"] @ store(t["a"]).T) @ store(t["b"]).T * CONFIG.scaling)

    wide = {n: t.double() for n, t in given.items()}
    exact = _gradients(lambda t: formula(t, lambda v: v), wide)
    _check(_gradients(ours, given), exact, _gradients(lambda t: formula(t, _round), wide))


def test_experts() -> None:
    by_expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS))
    given = {
        "x": _values(ROWS, IN, seed=3).bfloat16(),
        "out_before": _values(ROWS, OUT, seed=6).bfloat16(),
        "a": _values(EXPERTS, R, IN, seed=4, scale=IN**-0.5).float(),
        "b": _values(EXPERTS, OUT, R, seed=5, scale=R**-0.5).float(),
    }

    def ours(t: dict[str, Tensor]) -> Tensor:
        experts = nn.Module()
        experts.register_parameter("up", nn.Parameter(torch.empty(EXPERTS, OUT, IN)))
        lora = ExpertsLora(experts, ["up"], CONFIG, torch.float32)
        del lora.up_A, lora.up_B
        lora.__dict__.update(up_A=t["a"], up_B=t["b"])
        out = lora.add(t["out_before"], t["x"], "up", Groups(by_expert, EXPERTS, COUNTS))
        assert out.dtype == torch.bfloat16
        return out

    def formula(t: dict[str, Tensor], store: Callable[[Tensor], Tensor]) -> Tensor:
        a, b = store(t["a"])[by_expert], store(t["b"])[by_expert]
        narrow = store(store(torch.einsum("si,sri->sr", t["x"], a)) * CONFIG.scaling)
        return store(t["out_before"] + store(torch.einsum("sr,sor->so", narrow, b)))

    wide = {n: t.double() for n, t in given.items()}
    exact = _gradients(lambda t: formula(t, lambda v: v), wide)
    _check(_gradients(ours, given), exact, _gradients(lambda t: formula(t, _round), wide))
