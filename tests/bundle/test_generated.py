"""Kernels as generated, found by parse and put into a reduced twin: loss and every gradient stay the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_templates
from kernel_templates.registry import load_spec
from onboarding.stages.generate.specialize import specialise
from onboarding.stages.package.bundle_files.apply import apply
from onboarding.stages.package.layout import KernelEntry
from onboarding.stages.parse.analyse import analyse
from onboarding.twin import build, derive
from tests.align.torch_candidates import write_bundle

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATES = Path(kernel_templates.__file__).parent
TOLERANCE = 1e-4
"""Of a gradient's norm: fp32 on both sides, in other orders of summation."""

MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "glm-5.3-flash": (
        json.loads((EXAMPLES / "glm-5.3-flash" / "config.json").read_text()),
        {"hyper_connection", "short_convolution", "sparse_attention", "indexer"},
    ),
    "deepseek_v4": ({"model_type": "deepseek_v4"}, {"hyper_connection"}),
    "hy_v4": ({"model_type": "hy_v4"}, {"hyper_connection", "sparse_attention", "indexer"}),
    "deepseek_v32": ({"model_type": "deepseek_v32"}, {"sparse_attention", "indexer"}),
    "glm_moe_dsa": ({"model_type": "glm_moe_dsa"}, {"sparse_attention", "indexer"}),
    "lfm2": ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 16}, {"short_convolution"}),
    "mamba2": ({"model_type": "mamba2"}, {"short_convolution", "linear_attention"}),
    "bamba": ({"model_type": "bamba"}, {"short_convolution", "linear_attention"}),
    "falcon_h1": ({"model_type": "falcon_h1"}, {"short_convolution", "linear_attention"}),
    "granitemoehybrid": (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 16},
        {"short_convolution", "linear_attention"},
    ),
    "zamba2": ({"model_type": "zamba2"}, {"short_convolution", "linear_attention"}),
    "nemotron_h": ({"model_type": "nemotron_h"}, {"short_convolution", "linear_attention"}),
    "jamba": ({"model_type": "jamba"}, {"short_convolution"}),
}
FAST = {"hy_v4", "lfm2", "mamba2", "glm_moe_dsa"}


def step(model: Any, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_a_twin_with_generated_kernels_is_the_same_model(name: str, tmp_path: Path) -> None:
    config, families = MODELS[name]
    uses = [u for u in analyse(config, tokens=256).architecture.uses if u.spec["family"] in families]
    assert {u.spec["family"] for u in uses} == families
    kernels = [
        KernelEntry(
            digest=use.digest,
            spec=use.spec,
            words=use.words,
            source=specialise(TEMPLATES / use.spec["family"] / "template.py", load_spec(use.spec)).source,
            bindings=[b.model_dump() for b in use.bindings],
            verified=[{"level": "interpreted", "device": "cpu", "triton": "3.6.0"}],
        )
        for use in uses
    ]
    model = build(derive(config, layers_at_least=2, sequence_length=40))
    ids = torch.arange(2 * 40).reshape(2, 40) * 37 % 256
    expected, gradients = step(model, ids)
    applied = apply(model, bundle=write_bundle(tmp_path, kernels), verify=False)
    loss, found = step(model, ids)
    assert not applied.fallbacks
    assert set(applied.ran()) == {use.digest for use in uses}
    assert all(count > 0 for count in applied.ran().values())
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        difference = (found[parameter] - gradient).norm()
        assert difference <= TOLERANCE * gradient.norm() + 1e-7, parameter
