"""Documents of one row, against each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import CONFIGS, definition
from torch import Tensor, nn

from runtime import weights
from runtime.config import ModelConfig
from runtime.model import build, initial_values, read_definition
from runtime.packing import Boundaries, isolate, prove_isolation
from runtime.refusal import Refused

CPU = torch.device("cpu")
KIMI = Path(__file__).parents[2] / "examples" / "kimi-linear" / "config.json"


def model_in(folder: Path, name: str) -> nn.Module:
    if name == "kimi-linear":
        from onboarding.twin import derive

        plan = derive(json.loads(KIMI.read_text()), layers_at_least=2, sequence_length=64)
        (folder / "config.json").write_text(json.dumps(plan.config))
    else:
        definition(folder, name)
    config, choice = read_definition(folder), ModelConfig(definition=str(folder))
    model = build(config, choice, "cpu", storage=torch.float64)
    values = weights.Values(initial_values(config, choice, "cpu"))
    plan_ = weights.plan_load(model, values)
    weights.materialize(model, CPU)
    weights.load(model, values, plan_)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "isolated", "tolerance"),
    [
        ("llama", [], 1e-12),
        ("deepseek-v3", [], 1e-12),
        ("qwen3-next", ["Qwen3NextGatedDeltaNet"], 1e-12),
        # its reference computes the delta rule in float32 whatever the model's dtype
        pytest.param("kimi-linear", ["KimiLinearDeltaAttention"], 1e-6, marks=pytest.mark.slow),
    ],
)
def test_packed_documents_give_what_each_gives_alone(
    tmp_path: Path, name: str, isolated: list[str], tolerance: float
) -> None:
    model = model_in(tmp_path, name)
    boundaries = Boundaries()

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    assert prove_isolation(model, boundaries, forward) == isolated
    generator = torch.Generator().manual_seed(1)
    lengths = [[5, 17, 9, 1], [30, 2]]
    rows = [[torch.randint(256, (n,), generator=generator) for n in row] for row in lengths]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    boundaries.set(lengths, CPU)
    packed = forward(ids, positions)
    packed.square().sum().backward()  # type: ignore[no-untyped-call]
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    boundaries.set([[1]], CPU)
    alone = [torch.cat([forward(d[None], torch.arange(len(d))[None])[0] for d in row]) for row in rows]
    torch.testing.assert_close(packed, torch.stack(alone), rtol=tolerance, atol=tolerance)
    torch.stack(alone).square().sum().backward()  # type: ignore[no-untyped-call]
    for key, value in found.items():
        expected = dict(model.named_parameters())[key].grad
        assert expected is not None
        scale = expected.abs().max().clamp_min(1e-9)
        assert ((value - expected).abs().max() / scale) < 1e-5, key  # routers and decays work in float32


class Sum(nn.Module):
    """Mixes tokens and cannot tell documents apart: a running sum."""

    def forward(self, hidden_states: Tensor, scale: tuple[Tensor, Tensor], flag: bool = True) -> tuple[Tensor, None]:
        assert flag
        return (hidden_states * scale[0] + scale[1]).cumsum(1), None


def test_isolated_modules_get_each_document_of_each_row_with_its_own_arguments() -> None:
    module, boundaries = Sum(), Boundaries()
    isolate(module, boundaries)
    x = torch.arange(24.0).reshape(2, 6, 2)
    scale = (torch.arange(6.0).reshape(1, 6, 1), torch.ones(2, 6, 1))
    boundaries.set([[2, 4], [6]], CPU)
    out, none = module(x, scale=scale)
    inside = x * scale[0] + scale[1]
    expected = torch.stack([torch.cat([inside[0, :2].cumsum(0), inside[0, 2:].cumsum(0)]), inside[1].cumsum(0)])
    assert torch.equal(out, expected)
    assert none is None
    boundaries.set([[6], [6]], CPU)
    assert torch.equal(module(x, scale=scale)[0], inside.cumsum(1))


def test_a_leak_outside_the_blocks_is_refused(tmp_path: Path) -> None:
    model: Any = model_in(tmp_path, "llama")
    own = model.model.norm.forward

    def leaky(ids: Tensor, positions: Tensor) -> Any:
        def mixing(module: nn.Module, args: Any) -> Any:
            return (args[0].cumsum(1), *args[1:])

        handle = model.model.layers[0].register_forward_pre_hook(mixing)
        try:
            return model(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            handle.remove()

    assert own is not None
    with pytest.raises(Refused, match="documents of one row see each other"):
        prove_isolation(model, Boundaries(), leaky)


def test_every_config_is_a_model(tmp_path: Path) -> None:
    assert all(read_definition(definition(tmp_path / n, n)).model_type == c["model_type"] for n, c in CONFIGS.items())
