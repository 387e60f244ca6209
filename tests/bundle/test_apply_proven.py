"""From parse to a model: what is proven of rotary functions, routers and LayerNorms is what its modules then run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_templates import interpreter
from kernel_templates.registry import load_spec
from onboarding.stages.generate.specialize import specialise
from onboarding.stages.package.bundle_files.apply import apply
from onboarding.stages.package.layout import TEMPLATES, KernelEntry, write_kernels
from onboarding.stages.parse.analyse import analyse

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90, "pad_token_id": 0}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere": {},
    "olmo2": {},
    "starcoder2": {},
    "gemma3_text": {},
    "qwen3_moe": {**MOE, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 2},
}  # fmt: skip
CASES = [("rotary", name) for name in MODELS]
CASES += [("routing", name) for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")]
CASES += [("norm", name) for name in ("cohere", "starcoder2")]


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not torch.cuda.is_available():
        interpreter.activate()


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(2 * 17).reshape(2, 17) * 37 % 90
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


FAST = [("rotary", "llama"), ("rotary", "gpt_oss"), ("routing", "deepseek_v3"), ("norm", "cohere")]


@pytest.mark.parametrize(
    ("family", "name"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_parse_proves_is_what_the_model_runs(family: str, name: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(name, **(SMALL | MODELS[name]))
    parsed = analyse(config.to_dict(), tokens=64, name=name).architecture
    uses = [use for use in parsed.uses if use.spec["family"] == family]
    assert uses, parsed.warnings
    kernels = []
    for use in uses:
        source = specialise(TEMPLATES / family / "template.py", load_spec(use.spec)).source
        bindings = [b.model_dump() for b in use.bindings]
        kernels.append(
            KernelEntry(
                digest=use.digest, spec=use.spec, words=use.words, source=source, bindings=bindings, verified=[]
            )
        )
    (tmp_path / "bundle.json").write_text(json.dumps({"kernels": write_kernels(tmp_path, kernels)}))
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # a bias that decides, where routers have one
        for buffer, value in model.named_buffers():
            if "correction" in buffer:
                value.copy_(0.1 * torch.randn(value.shape))
    loss, gradients = step(model)
    applied = apply(model, bundle=tmp_path, verify=False)
    with_kernels, found = step(model)
    assert applied.ran() == {use.digest: len(applied.swapped[use.digest]) for use in uses}
    assert not applied.fallbacks
    torch.testing.assert_close(with_kernels, loss, rtol=1e-5, atol=1e-5)
    for parameter in gradients:
        torch.testing.assert_close(found[parameter], gradients[parameter], rtol=1e-3, atol=1e-5)
    applied.remove()
    assert step(model)[0] == loss
