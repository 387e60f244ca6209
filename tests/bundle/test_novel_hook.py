"""The hook of novel operators: what was proven runs on the kernel, any other call on the model's own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onboarding.stages.package.bundle_files import hooks, novel
from onboarding.stages.package.bundle_files.apply import Applied

SIGNATURE = {
    "dims": {"N": {"full": 8}, "D": {"full": 4}},
    "inputs": [
        {"name": "x", "shape": ["N", "2*D"], "dtype": "activation"},
        {"name": "w", "shape": ["D"], "dtype": "activation"},
    ],
    "outputs": [{"name": "y", "shape": ["N", "D"], "dtype": "activation"}],
}
SPEC = {"family": "novel", "signature": json.dumps(SIGNATURE)}


def halves(x: Tensor, w: Tensor, scaling: float, causal: bool = True) -> Tensor:
    first, second = x.chunk(2, -1)
    return first * second * w * scaling


class Calls(nn.Module):
    """Calls a function of its file."""

    def __init__(self, scaling: float = 0.5) -> None:
        super().__init__()
        self.weight, self.scaling, self.causal = nn.Parameter(torch.ones(4)), scaling, True

    def forward(self, x: Tensor) -> Tensor:
        return halves(x, self.weight, self.scaling, causal=self.causal)


class Whole(nn.Module):
    """Is the operator itself, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, None]:
        return halves(x, self.weight, 0.5), None


def marked(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """The kernel: what it returns can be told from the model's own."""
    return (torch.full((x.shape[0], w.shape[0]), 7.0),)


def put(module: nn.Module, attributes: dict[str, str], function: str = "") -> tuple[Applied, Callable[[], None]]:
    applied = Applied()
    binding = {"hook": "novel", "function": function or None, "attributes": attributes}
    swap = hooks.Swap({"spec": SPEC, "digest": "d"}, binding, attributes, "m", marked, applied)
    assert novel.mismatch(SPEC, module, attributes) is None
    return applied, novel.install(hooks, module, swap)


FUNCTION = {
    "x": "x",
    "w": "w",
    "constant scaling": "D ** -0.5",
    "constant causal": "True",
    "returns": "y",
    "form": "tensor",
}
X = torch.ones(3, 8)


def test_a_call_that_was_proven_runs_on_the_kernel_and_undo_restores() -> None:
    module, other = Calls(), Calls()
    applied, undo = put(module, FUNCTION, "halves")
    assert bool((module(X) == 7).all())
    assert bool((other(X) == 0.5).all()), "another instance keeps its own code"
    assert applied.ran() == {}
    assert applied.calls == {"d": {"m": 1}}
    undo()
    assert bool((module(X) == 0.5).all())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "scaling", 0.25), "scaling is 0.25"),
        (lambda m: setattr(m, "scaling", True), "scaling is True"),
        (lambda m: setattr(m, "causal", False), "causal is False"),
        (lambda m: m.double(), "dtypes"),
    ],
)
def test_any_other_call_runs_the_models_own_code(change: Callable[[Any], Any], why: str) -> None:
    module = Calls()
    change(module)
    applied, undo = put(module, FUNCTION, "halves")
    x = X.to(module.weight.dtype)
    assert bool((module(x) == float(module.scaling)).all())
    assert why in applied.fallbacks["m"]
    undo()


def test_sizes_that_do_not_bind_are_left_to_the_model() -> None:
    module = Calls()
    applied, undo = put(module, FUNCTION, "halves")
    with pytest.raises(RuntimeError, match="size"):
        module(torch.ones(3, 10))
    assert "a size 4 where" in applied.fallbacks["m"]
    undo()


def test_a_forward_with_a_parameter_of_its_own() -> None:
    module = Whole()
    attributes = {"x": "x", "w": "self.weight", "constant mask": "None", "returns": "y None", "form": "tuple"}
    applied, undo = put(module, attributes)
    y, none = module(X)
    assert none is None
    assert bool((y == 7).all())
    y, _ = module(X, mask=X)
    assert bool((y == 1).all())
    assert "mask is" in applied.fallbacks["m"]
    undo()
    assert novel.mismatch(SPEC, Calls(), {"w": "self.gain"}) == "no tensor gain"
